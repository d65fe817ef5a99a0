"""The results of a run as one self-contained page, and its figures as files."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
from markupsafe import Markup, escape

from linearize.errors import ResourceError
from linearize_evals.compare import GATE, TOO_WEAK
from linearize_evals.phrases import SIDES
from linearize_evals.plots import STYLE, Picture, pictures
from linearize_evals.settings import write_file
from linearize_evals.tables import (
    ablation_tables,
    cache_table,
    generation_table,
    lm_eval_tables,
    pairs_table,
    perplexity_table,
    recall_table,
    setting_tables,
)

PAGE = "report.html"
FIGURES = "figures"
DPI = 150

Results = Mapping[str, Any]


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write `report.html`, `figures/*.svg` and `figures/*.png`; the same results give the same bytes.

    Args:
        results: what docs/results.md describes.
        folder: is made if it isn't there; files of these names are replaced, and other figures of an earlier run
            removed.

    Returns:
        The files that were written, the page first.

    Raises:
        ResourceError: the disk refuses.
    """
    drawings: dict[str, list[Markup]] = {}
    written = []
    with mpl.rc_context(STYLE):
        for picture in pictures(results):
            svg = _bytes(picture, "svg").decode()
            path = folder / FIGURES / f"{_slug(picture.name)}.svg"
            write_file(path, svg)
            write_file(path.with_suffix(".png"), _bytes(picture, "png"))
            written += [path, path.with_suffix(".png")]
            drawings.setdefault(picture.task, []).append(_inline(svg, picture))
    page = folder / PAGE
    write_file(page, render(results, drawings))
    _remove_others(folder / FIGURES, {path.name for path in written})
    return [page, *written]


def render(results: Results, drawings: Mapping[str, Sequence[Markup]]) -> str:
    """The page as HTML; `drawings` are inline SVGs by task. Every text of the results is escaped."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    template = environment.from_string(Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8"))
    names = {side: (results["models"].get(side) or {}).get("name") for side in SIDES}
    title = f"What {names['student']} recalls"
    return template.render(
        title=f"{title} of what {names['teacher']} does" if names["teacher"] else title,
        subtitle=f"{results['created']}, linearize {results['versions'].get('linearize', '?')}",
        findings=results["findings"],
        sections=[section for section in _sections(results, drawings) if section["tables"] or section["groups"]],
        weak=TOO_WEAK,
        gate=GATE,
    )


def _sections(results: Results, drawings: Mapping[str, Sequence[Markup]]) -> Iterator[dict[str, Any]]:
    tasks, text = results["tasks"], results["text"]
    yield _section(
        "Recall", [recall_table(tasks), pairs_table(tasks), generation_table(tasks)], _groups(tasks, drawings)
    )
    yield _section("Perplexity", [perplexity_table(text)], _groups(text, drawings))
    note = (
        "Accuracy of the student with one branch's output at zero. The difference is whole minus without, the rise "
        "without minus whole: both are above 0 for a branch that helps."
    )
    yield _section("Without a branch", list(ablation_tables(results["ablations"] or {})), [], note)
    yield _section("Other tasks of lm-eval", list(lm_eval_tables(results["lm_eval"] or {})))
    cache = [{"title": "By length of the context", "drawings": drawings[""]}] if drawings.get("") else []
    yield _section("Memory", [cache_table(results["models"])], cache)
    yield _section("Models, settings and versions", list(setting_tables(results)))


def _section(
    title: str,
    tables: Sequence[dict[str, Any]],
    groups: Sequence[dict[str, Any]] = (),
    note: str = "",
) -> dict[str, Any]:
    return {"title": title, "note": note, "tables": [table for table in tables if table["rows"]], "groups": groups}


def _groups(tasks: Iterable[str], drawings: Mapping[str, Sequence[Markup]]) -> list[dict[str, Any]]:
    return [{"title": task, "drawings": drawings[task]} for task in tasks if drawings.get(task)]


def _bytes(picture: Picture, kind: str) -> bytes:
    buffer = io.BytesIO()
    nameless = {"Date": None, "Creator": None, "Format": None, "Type": None} if kind == "svg" else {"Software": None}
    picture.figure.savefig(buffer, format=kind, dpi=DPI, metadata=nameless)
    return buffer.getvalue()


def _inline(svg: str, picture: Picture) -> Markup:
    """The <svg> element for a page with many: its ids get a prefix, and it gets a role and a label."""
    prefix = f"{_slug(picture.name)}-"
    body = svg[svg.index("<svg") :]
    body = re.sub(r'\bid="', f'id="{prefix}', body)
    body = re.sub(r'href="#', f'href="#{prefix}', body)
    body = re.sub(r"url\(#", f"url(#{prefix}", body)
    return Markup(body.replace("<svg", f'<svg role="img" aria-label="{escape(picture.alt)}"', 1))


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_") or "figure"


def _remove_others(figures: Path, kept: Collection[str]) -> None:
    """Remove the figures that an earlier run left; nothing but regular files of this folder itself."""
    if figures.is_symlink() or not figures.is_dir():
        return
    try:
        for path in list(figures.iterdir()):
            if path.suffix in (".svg", ".png") and path.name not in kept and path.is_file() and not path.is_symlink():
                path.unlink()
    except OSError as error:
        raise ResourceError(
            f"old figures in {figures} can't be removed: {error.strerror or error}", "Remove them yourself"
        ) from error
