"""Errors as objects: a slug, what happened, where, and what to do. `cli.main` alone renders them and picks the exit code."""

from __future__ import annotations

from rlmismatch.exitcodes import ExitCode


class RlmismatchError(Exception):
    """An error a person can act on.

    slug: stable kebab-case id, e.g. ``checkpoint-heads-do-not-fit-tp``.
    what: one sentence. where: file, side or rank, if any. hint: what to do next, if known.
    details: further lines (a list of tensors, the end of a log), shown below the sentence.
    """

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, slug: str, what: str, *, where: str = "", hint: str = "", details: tuple[str, ...] = ()) -> None:
        super().__init__(what)
        self.slug = slug
        self.what = what
        self.where = where
        self.hint = hint
        self.details = details

    def to_json(self) -> dict[str, object]:
        return {
            "slug": self.slug,
            "what": self.what,
            "where": self.where,
            "hint": self.hint,
            "details": list(self.details),
            "exit_code": int(self.exit_code),
        }

    @classmethod
    def from_json(cls, data: dict[str, object]) -> RlmismatchError:
        """The same error on the other side of a process boundary; the class is chosen by the exit code."""
        code = ExitCode(int(str(data["exit_code"])))
        kind = next(
            (k for k in (UsageError, EngineError, EnvironmentUnfitError, InconclusiveError, ContractError) if k.exit_code == code), cls
        )
        details = data.get("details") or ()
        assert isinstance(details, (list, tuple))
        return kind(
            str(data["slug"]),
            str(data["what"]),
            where=str(data.get("where", "")),
            hint=str(data.get("hint", "")),
            details=tuple(map(str, details)),
        )


class UsageError(RlmismatchError):
    """Bad option, bad checkpoint, bad prompts: the input can be mended."""


class EngineError(RlmismatchError):
    """An engine crashed, hung, or was killed."""

    exit_code = ExitCode.ENGINE


class EnvironmentUnfitError(RlmismatchError):
    """This machine cannot run what was asked for."""

    exit_code = ExitCode.ENVIRONMENT


class InconclusiveError(RlmismatchError):
    """The run ended without evidence either way."""

    exit_code = ExitCode.INCONCLUSIVE


class ContractError(RlmismatchError):
    """The two sides may not be compared."""

    exit_code = ExitCode.CONTRACT
