"""One Report model and its renderers. A renderer is named by its format and imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from rlmismatch.errors import UsageError
from rlmismatch.report.blocks import Page
from rlmismatch.report.compare import Comparison, compare
from rlmismatch.report.compare import page as comparison_page
from rlmismatch.report.model import Report
from rlmismatch.report.sections import page as report_page

FORMATS: Final = ("console", "text", "json", "markdown", "html", "junit")
_WIDE: Final = ("console", "text")  # laid out to a width
_SHARED: Final = ("markdown", "html")  # read far from the run's folder, so the provenance goes along


def render(report: Report, form: str = "console", *, verbose: bool = False, width: int | None = None) -> str:
    """The report in one of FORMATS, ending in a newline. Raises UsageError for any other format.

    verbose: every contract field, sequence, knob and control, and the full provenance; json and junit always hold all.
    width: columns of console and text; None is 100, and for console the terminal's own where that is narrower.
    """
    module = _renderer(form)
    if form in ("json", "junit"):
        return str(module.render(report))
    return _render_page(form, report_page(report, verbose=verbose, provenance=form in _SHARED), width)


def render_comparison(comparison: Comparison, form: str = "console", *, width: int | None = None) -> str:
    """What changed between two runs, in any of FORMATS but junit. Raises UsageError for others."""
    module = _renderer(form)
    if form == "junit":
        raise UsageError("format-not-for-two-runs", "a comparison of two runs has no junit form", hint=f"one of {', '.join(FORMATS[:-1])}")
    return str(module.dump(comparison.to_json())) if form == "json" else _render_page(form, comparison_page(comparison), width)


def _render_page(form: str, page: Page, width: int | None) -> str:
    options = {"width": width} if width is not None and form in _WIDE else {}
    return str(_renderer(form).render(page, **options))


def _renderer(form: str) -> Any:
    if form not in FORMATS:
        raise UsageError("format-unknown", f"there is no format {form!r}", hint=f"one of {', '.join(FORMATS)}")
    return import_module(f"rlmismatch.report.{form}")


__all__ = ["FORMATS", "Comparison", "Report", "compare", "render", "render_comparison"]
