"""The site of docs/: it builds without a warning, its links lead somewhere, and it loads nothing from a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("zensical", reason="zensical needs Python 3.11 or newer: the site was NOT built")

ROOT = Path(__file__).parents[2]


class Page(HTMLParser):
    """What a page links to, what it loads, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if "src" in given:
            self.loads.append(given["src"])
        if "href" in given:
            (self.links if tag == "a" else self.loads).append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    built = subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--strict"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "build" / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


@pytest.mark.by_hand
def test_links_and_anchors_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    lost = []
    for path, page in pages.items():
        if path.name == "404.html":  # its addresses begin at the root of a server
            continue
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else set()
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in anchors):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert not lost, "\n".join(lost)


def test_nothing_is_loaded_from_a_network(pages: dict[Path, Page]) -> None:
    assert {load for page in pages.values() for load in page.loads if urlsplit(load).netloc} == set()


def test_every_page_is_in_a_section(pages: dict[Path, Page], site: Path) -> None:
    menu = {(site / urlsplit(link).path).resolve() for link in pages[site / "index.html"].links}
    left_out = [p.name for p in sorted(ROOT.glob("docs/*.md")) if site / f"{p.stem}.html" not in menu]
    assert not left_out, f"zensical.toml has no place in `nav` for {', '.join(left_out)}"


def test_every_decision_is_listed() -> None:
    decisions = ROOT / "docs" / "adr"
    listed = (decisions / "README.md").read_text()
    assert not [p.name for p in sorted(decisions.glob("0*.md")) if f"]({p.name})" not in listed]
