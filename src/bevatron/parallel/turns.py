"""Connections over which the processes of a group on one machine make batches in turns."""

import os
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

from bevatron.data.loader.turns import Turns
from bevatron.parallel.collectives import gather_json
from bevatron.parallel.groups import Group
from bevatron.parallel.mesh import Mesh

SECONDS = 20.0
"""Time for the others to connect."""
CREDENTIALS = struct.Struct("iII")
"""Process, user and group at the other end of a connection."""


def turns_of(group: Group, mesh: Mesh) -> Turns | None:
    """Return the turn of this process among those of its group on its machine.

    None for a process without a group. All of a group connect together, also one that is alone on
    its machine.
    """
    if group.process_group is None:
        return None
    machine = mesh.rank // mesh.local_world
    here = [rank for rank in group.ranks if rank // mesh.local_world == machine]
    members = replace(mesh, rank=group.index, world=group.size, group=group.process_group)
    places = [group.ranks.index(rank) for rank in here]
    index = here.index(mesh.rank)
    return Turns(index, len(here), partial(_connected, members, places, index))


def _connected(members: Mesh, places: Sequence[int], index: int) -> Mapping[int, Connection]:
    """Connect the processes of one machine; none of any machine's if one could not.

    Parameters
    ----------
    members : all processes of the group
    places : of those of this machine in the group
    index : of this process among them
    """
    lines: dict[int, Connection] = {}
    with socket.socket(socket.AF_UNIX) as server:
        # A name without a file, which nobody can guess before it is there.
        name, listens = f"\0bevatron-{secrets.token_hex(16)}", False
        with suppress(OSError):
            server.bind(name)
            server.listen(len(places))
            server.settimeout(SECONDS)
            listens = True
        names = gather_json(name if listens else None, members)
        if all(names):
            with suppress(OSError, EOFError):
                for other in range(index):
                    lines[other] = _call(names[places[other]], index)
                for _ in range(index + 1, len(places)):
                    other, line = _answer(server)
                    lines[other] = line
    if all(gather_json(len(lines) + 1 == len(places), members)):
        return lines
    for line in lines.values():
        line.close()
    return {}


def _call(name: str, index: int) -> Connection:
    """Connect to a process that listens, and say who calls."""
    caller = socket.socket(socket.AF_UNIX)
    caller.settimeout(SECONDS)
    caller.connect(name)
    caller.settimeout(None)
    line = Connection(caller.detach())
    line.send_bytes(bytes([index]))
    return line


def _answer(server: socket.socket) -> tuple[int, Connection]:
    """Accept a connection of this user; what comes through it is unpickled."""
    while True:
        caller, _ = server.accept()
        given = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        if CREDENTIALS.unpack(given)[1] == os.getuid():
            line = Connection(caller.detach())
            return line.recv_bytes()[0], line
        caller.close()
