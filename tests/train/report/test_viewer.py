"""A page of a structure is whole: it carries its script and data, and asks for nothing."""

import json
import re

from bevatron.train.report.page import Report
from bevatron.train.report.viewer import structure_view

MMCIF = "data_x\nloop_\n_atom_site.id\n1\n# </script><b> <!--<script>\n"


def test_the_structure_arrives_in_the_page_letter_by_letter():
    page = Report("Complex").structure(MMCIF, "A < B").html()
    found = re.search(r'id="structure-data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(found[1])["text"] == MMCIF
    assert "<" not in found[1]  # `<!--<script` would take the rest of the page for a script
    assert "A &lt; B" in page


def test_nothing_is_loaded_from_elsewhere():
    view = structure_view(MMCIF)
    assert "createViewer" in view
    assert not re.search(r"<(script|link|img)[^>]*\b(src|href)=", view)
