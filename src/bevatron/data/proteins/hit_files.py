"""Assignment of template hit files to chains, by names and by neighbouring alignments."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bevatron.data.proteins.chain_index import UNKNOWN_DAY
from bevatron.data.proteins.places import ChainSequences, Place
from bevatron.data.proteins.template_search import HitsOf, TemplateQuery, queries_of
from bevatron.data.readers.proteins.alphabet import CLASSES
from bevatron.errors import DataError, reason_of

# 1abc_A, 1abc-assembly1A: names of chains, of which whatever follows is not part.
_CHAIN = re.compile(r"([A-Za-z0-9-]+)_([A-Za-z0-9]+)(?![A-Za-z0-9])")
_OF_ASSEMBLY = re.compile(r"([A-Za-z0-9]+)-assembly\d+([A-Za-z0-9]+)(?![A-Za-z0-9])")
_CODE = re.compile(r"(?:pdb(?=[0-9][a-z0-9]{3}$))?([a-z0-9_-]+?)(?:-assembly\d+)?$")

_OF_NO_CHAIN = (
    "its hits, of '{}', are by name those of no chain of the structures, and no single alignment "
    "is next to it"
)


@dataclass(frozen=True)
class NamedChain:
    """A protein of a structure or of an input.

    Attributes
    ----------
    entry : code of the structure, in lower case
    names : names of its chain
    classes : its sequence as classes of the alphabet, int8
    released : day, see `bevatron.data.proteins.chain_index.day_number`
    """

    entry: str
    names: tuple[str, ...]
    classes: bytes
    released: int = UNKNOWN_DAY


def entry_code(path: str | Path) -> str:
    """Return the lower-case code of an entry from the name of its file.

    Examples
    --------
    >>> [entry_code(x) for x in ("4HHB.cif.gz", "pdb4hhb.ent", "4hhb-assembly1.cif")]
    ['4hhb', '4hhb', '4hhb']
    """
    name = Path(path).name.lower().partition(".")[0]
    found = _CODE.match(name)
    return found[1] if found else name


def template_queries(
    files: Iterable[Path],
    chains: Sequence[NamedChain],
    sequences: ChainSequences,
    alignments: Mapping[Path, bytes],
    duplicates: Iterable[Sequence[str]] = (),
    *,
    strict: bool = False,
) -> tuple[list[TemplateQuery], list[tuple[str, str]]]:
    """Find the chains whose hits are in files.

    Hits belong to the chain that the file calls their query, else to the one that the file or its
    folder is named after, else to the query of the alignments next to the file or one folder up, if
    they share one, else to the only chain.

    Parameters
    ----------
    files : as `read_hits` takes them, better searches first
    chains : chains of the structures
    sequences : theirs
    alignments : classes of the query of each alignment
    duplicates : groups of names of chains of equal sequence
    strict : a damaged file is an error

    Returns
    -------
    The sequences with hits, and (file, reason) of files that belong to no chain.
    """
    owner = _Owners(chains, sequences, alignments, duplicates)
    found: dict[bytes, dict[HitsOf, None]] = {}
    rejects = []
    for path in files:
        try:
            queries = queries_of(path)
        except DataError as error:
            if strict:
                raise
            rejects.append((str(path), reason_of(error, path)))
            continue
        unknown = []
        for query in queries:
            places = owner.of(path, query, alone=len(queries) == 1)
            for chain, first in places:
                found.setdefault(chain, {})[HitsOf(path, query, first)] = None
            if not places:
                unknown.append(query or "query")
        if unknown and len(unknown) == len(queries):
            rejects.append((str(path), _OF_NO_CHAIN.format(unknown[0])))
        elif unknown:
            reason = (
                f"{len(unknown)} of its {len(queries)} queries are not chains of the structures"
            )
            rejects.append((str(path), f"{reason} ('{unknown[0]}')"))
    return _queries(found, chains), rejects


class _Owners:
    """The chains that files of hits belong to."""

    def __init__(
        self,
        chains: Sequence[NamedChain],
        sequences: ChainSequences,
        alignments: Mapping[Path, bytes],
        duplicates: Iterable[Sequence[str]],
    ) -> None:
        self._sequences = sequences
        self._named: dict[str, bytes] = {}
        for chain in chains:
            for name in chain.names:
                self._named.setdefault(f"{chain.entry}_{name}", chain.classes)
        for group in duplicates:
            names = [_lower_code(name) for name in group]
            known = [self._named[name] for name in names if name in self._named]
            for name in names if known else ():
                self._named.setdefault(name, known[0])
        self._beside: dict[Path, set[bytes]] = {}
        for path, query in alignments.items():
            for folder in list(path.parents)[:2]:
                self._beside.setdefault(folder, set()).add(query)
        distinct = {chain.classes for chain in chains}
        self._only = next(iter(distinct)) if len(distinct) == 1 else None

    def of(self, path: Path, query: str, *, alone: bool) -> list[Place]:
        """Return the chains of a query, ``alone`` if the file has no other."""
        texts = [query, path.name, *(folder.name for folder in list(path.parents)[:2])]
        for text in texts if alone else texts[:1]:
            for form in (_OF_ASSEMBLY, _CHAIN):
                match = form.match(text)
                name = f"{match[1].lower()}_{match[2]}" if match else ""
                if name in self._named:
                    return [Place(self._named[name], 0)]
        if not alone:
            return []
        for folder in list(path.parents)[:2]:
            beside = self._beside.get(folder, set())
            if len(beside) == 1:
                return self._sequences.places(next(iter(beside)))
        return [] if self._only is None else [Place(self._only, 0)]


def _lower_code(name: str) -> str:
    code, _, chain = name.rpartition("_")
    return f"{code.lower()}_{chain}"


def _queries(
    found: Mapping[bytes, Iterable[HitsOf]], chains: Sequence[NamedChain]
) -> list[TemplateQuery]:
    days: dict[bytes, set[int]] = {}
    own: dict[bytes, set[str]] = {}
    for chain in chains:
        days.setdefault(chain.classes, set()).add(chain.released)
        if chain.released == UNKNOWN_DAY:
            own.setdefault(chain.classes, set()).add(chain.entry)
    return [
        TemplateQuery(
            sequence="".join(CLASSES[number] for number in classes),
            classes=classes,
            hits=tuple(hits),
            released=tuple(sorted(days[classes])),
            own=frozenset(own.get(classes, ())),
        )
        for classes, hits in found.items()
    ]
