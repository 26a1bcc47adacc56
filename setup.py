"""What setup.cfg cannot say: all files of an sdist, and a description that PyPI can show.

PyPI follows no relative link and shows no relative picture. With the address of the repository,
``CTL_URL=https://github.com/NAME/ctl python -m build``, they lead to its tag of this version, and
the page has links to source, documentation, changelog and issues. Without it, the description has
the texts of its links and pictures alone.
"""

import configparser
import os
import re

from setuptools import setup
from setuptools.command.sdist import sdist

URL = os.environ.get("CTL_URL", "").rstrip("/")
SETTINGS = configparser.ConfigParser()
SETTINGS.read("setup.cfg", encoding="utf-8")
TAG = f"v{SETTINGS['metadata']['version']}"


class Sdist(sdist):
    """With the tests, the benchmarks and the pages, so that ``.ci/run`` works in it."""

    def make_distribution(self) -> None:
        for folder in (".ci", ".docs", ".github", "benchmarks", "tests"):
            self.filelist.graft(folder)
        for folder in ("api", "commands", "site"):  # what a build of the site has written
            self.filelist.prune(f".docs/{folder}")
        self.filelist.extend(["CONTRIBUTING.md", ".ruff.toml"])
        self.filelist.global_exclude("*.py[co]")
        super().make_distribution()


def absolute(link: re.Match) -> str:
    picture, text, target = link.groups()
    if not URL:
        return text
    return f"{picture}[{text}]({URL}/{'raw' if picture else 'blob'}/{TAG}/{target})"


with open("README.md", encoding="utf-8") as page:
    description = re.sub(r"(!?)\[([^]]+)\]\((?!https?:|#)([^)\s]+)\)", absolute, page.read())

urls = {
    "Source": URL,
    "Documentation": f"{URL}/blob/{TAG}/ctl/README.md",
    "Changelog": f"{URL}/blob/{TAG}/.github/CHANGELOG.md",
    "Issues": f"{URL}/issues",
}

setup(
    cmdclass={"sdist": Sdist},
    long_description=description,
    project_urls=urls if URL else {},
)
