"""The page of the package: README without what leads to files of the repository."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class PackagePage(MetadataHookInterface):
    """Makes the page when the package is built."""

    def update(self, metadata):
        """Put it into the metadata."""
        text = page((Path(self.root) / "README.md").read_text())
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def page(readme):
    """Remove relative pictures; keep the text of relative links."""
    relative = r"\((?!\w+:|#)[^)\s]+\)"
    readme = re.sub(rf"!\[[^\]]*\]{relative}\n*", "", readme)
    return re.sub(rf"\[([^\]]+)\]{relative}", r"\1", readme)
