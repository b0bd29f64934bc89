"""A report in one HTML file: text, tables and figures, readable offline and for years.

Figures are embedded as PNG and the style sheet is in the file, so that it can be copied, mailed and
archived alone; nothing is loaded from elsewhere, and no script runs but the viewer of a structure.
"""

import base64
import html
import json
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from matplotlib.figure import Figure

from bevatron.config import dump_yaml
from bevatron.files import write_bytes_atomically, write_text_atomically
from bevatron.output import Cell, number
from bevatron.train.report.plots import png
from bevatron.train.report.viewer import structure_view


class Report:
    """An HTML page built from top to bottom.

    Parameters
    ----------
    figures : a folder where every figure is also written as PNG; None = only embedded

    Examples
    --------
    >>> report = Report("Water").section("Errors").text("On the test set.")
    >>> page = report.table(["quantity", "RMSE"], [["forces (meV/Å)", 21.3]]).html()
    >>> "21.3" in page and "<script" not in page
    True
    """

    def __init__(self, title: str, subtitle: str = "", figures: Path | None = None) -> None:
        self._title, self._subtitle, self._folder = title, subtitle, figures
        self._body: list[str] = []
        self._sections: list[str] = []

    def section(self, title: str) -> Self:
        """Begin a section, with an entry in the contents."""
        self._sections.append(title)
        self._body.append(f'<h2 id="s{len(self._sections)}">{html.escape(title)}</h2>')
        return self

    def text(self, content: str) -> Self:
        """Add a paragraph of plain text."""
        self._body.append(f"<p>{html.escape(content)}</p>")
        return self

    def notes(self, lines: Sequence[str]) -> Self:
        """Add a box of warnings, if there are any."""
        if lines:
            items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
            self._body.append(f'<ul class="notes">{items}</ul>')
        return self

    def highlights(self, values: Mapping[str, Cell]) -> Self:
        """Add the main figures in large type, each with its name."""
        cards = "".join(
            f"<div><b>{html.escape(number(value))}</b><span>{html.escape(name)}</span></div>"
            for name, value in values.items()
        )
        self._body.append(f'<div class="cards">{cards}</div>')
        return self

    def table(
        self, headers: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str = ""
    ) -> Self:
        """Add a table; numbers are rounded to four digits, their columns right-aligned."""
        numeric = [
            not any(isinstance(row[k], str | bool) for row in rows) for k in range(len(headers))
        ]
        head = "".join(
            _cell(name, "th", right) for name, right in zip(headers, numeric, strict=True)
        )
        lines = [
            "".join(_cell(value, "td", right) for value, right in zip(row, numeric, strict=True))
            for row in rows
        ]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        shown = f"<caption>{html.escape(caption)}</caption>" if caption else ""
        self._body.append(
            f'<div class="scroll"><table>{shown}<thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )
        return self

    def figure(self, figure: Figure, caption: str = "", name: str = "") -> Self:
        """Embed a figure; ``name`` is that of its PNG in the folder of figures."""
        picture = png(figure)
        if self._folder is not None and name:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_bytes_atomically(self._folder / f"{name}.png", picture)
        width = round(figure.get_figwidth() * 96)
        data = base64.b64encode(picture).decode()
        shown = html.escape(caption)
        self._body.append(
            f'<figure><img alt="{shown or html.escape(name)}" width="{width}" '
            f'src="data:image/png;base64,{data}"><figcaption>{shown}</figcaption></figure>'
        )
        return self

    def structure(self, mmcif: str, caption: str = "") -> Self:
        """Add a structure to turn, of mmCIF text; at most one on a page."""
        self._body.append(structure_view(mmcif, caption))
        return self

    def details(self, title: str, text: str) -> Self:
        """Add a long text in a fixed-width font, collapsed."""
        self._body.append(
            f"<details><summary>{html.escape(title)}</summary>"
            f"<pre>{html.escape(text)}</pre></details>"
        )
        return self

    def config(self, values: Mapping[str, Any], title: str = "Configuration") -> Self:
        """Add a configuration as YAML, collapsed."""
        plain = json.loads(json.dumps(values, default=str))
        return self.details(title, dump_yaml(plain))

    def versions(self, packages: Sequence[str] = ("bevatron", "torch", "numpy", "ase")) -> Self:
        """Add a table of versions: Python, the packages and the machine."""
        rows: list[Sequence[Cell]] = [["Python", platform.python_version()]]
        for package in packages:
            try:
                rows.append([package, metadata.version(package)])
            except metadata.PackageNotFoundError:
                rows.append([package, "not installed"])
        rows.append(["platform", platform.platform()])
        return self.table(["", "version"], rows)

    def html(self) -> str:
        """Assemble the page."""
        links = "".join(
            f'<a href="#s{k}">{html.escape(title)}</a>'
            for k, title in enumerate(self._sections, start=1)
        )
        contents = f"<nav>{links}</nav>" if len(self._sections) > 1 else ""
        title, subtitle = html.escape(self._title), html.escape(self._subtitle)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}</title><style>{CSS}</style></head>\n"
            f'<body><header><h1>{title}</h1><p class="subtitle">{subtitle}</p>{contents}</header>\n'
            + "\n".join(self._body)
            + "\n</body></html>\n"
        )

    def write(self, path: Path) -> Path:
        """Write the page atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, self.html())
        return path


def _cell(value: Cell, tag: str, right: bool) -> str:
    kind = ' class="number"' if right else ""
    return f"<{tag}{kind}>{html.escape(number(value))}</{tag}>"


CSS = """
/* Figures are drawn on white, so the page is light whatever the browser prefers. */
:root{color-scheme:light;--ink:#22262b;--soft:#667;--line:#e3e6ea;--blue:#0072b2;--pale:#f6f8fa}
*{box-sizing:border-box}
body{font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;
color:var(--ink);max-width:1120px;margin:0 auto;padding:2rem 1.5rem 4rem;background:#fff}
header{border-bottom:2px solid var(--blue);padding-bottom:.8rem;margin-bottom:1rem}
h1{font-size:1.7rem;margin:0}
.subtitle{color:var(--soft);margin:.2rem 0 .6rem;overflow-wrap:anywhere}
nav{display:flex;flex-wrap:wrap;gap:.1rem 1.1rem}
nav a{color:var(--blue);text-decoration:none;white-space:nowrap;font-size:14px}
nav a:hover{text-decoration:underline}
h2{font-size:1.2rem;margin:2.2rem 0 .6rem;padding-bottom:.2rem;border-bottom:1px solid var(--line)}
p{max-width:75ch}
.scroll{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-size:14px}
caption{text-align:left;color:var(--soft);padding:.3rem 0}
th{text-align:left;font-weight:600;border-bottom:2px solid var(--line);padding:.35rem .9rem;
vertical-align:bottom}
td{border-bottom:1px solid var(--line);padding:.3rem .9rem}
.number{text-align:right;font-variant-numeric:tabular-nums}
tbody tr:hover{background:var(--pale)}
/* Labels must stay readable: a wide figure scrolls on a narrow screen. */
figure{margin:1.2rem 0;overflow-x:auto}img{max-width:max(100%,700px);height:auto}
figcaption{position:sticky;left:0;color:var(--soft);font-size:14px;max-width:85ch}
.cards{display:flex;flex-wrap:wrap;gap:.8rem;margin:1rem 0}
.cards div{border:1px solid var(--line);border-radius:6px;padding:.6rem 1.1rem;
background:var(--pale)}
.cards b{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums}
.cards span{color:var(--soft);font-size:13px}
.notes{background:#fff7e6;border-left:4px solid #e69f00;margin:1rem 0;padding:.6rem 1rem .6rem 2rem}
details{margin:1rem 0}summary{cursor:pointer;color:var(--blue)}
pre{background:var(--pale);border:1px solid var(--line);border-radius:6px;padding:.8rem 1rem;
overflow-x:auto;font-size:13px;line-height:1.4}
@media print{nav{display:none}details[open] summary{display:none}body{max-width:none}}
""".strip()
