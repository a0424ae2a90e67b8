"""Three significant digits, zero only for zero, an em dash for what was not measured."""

import math

import pytest

from rlmismatch.drift.model import BudgetLine
from rlmismatch.report import measures
from rlmismatch.report.numbers import count, number, of, passing_limit, percent, plural, printable, probability_ratio, value


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (None, "—"),
        (0.0, "0"),
        (-0.0, "0"),
        (0.013249, "0.0132"),
        (0.05, "0.0500"),
        (1.0, "1.00"),
        (12.34, "12.3"),
        (123.4, "123"),
        (999.9, "1.00e3"),
        (1234.5, "1.23e3"),
        (0.001, "0.00100"),
        (0.00099999, "0.00100"),
        (0.000999, "9.99e-4"),
        (1.32e-7, "1.32e-7"),
        (5e-324, "4.94e-324"),
        (-0.0132, "-0.0132"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
    ],
)
def test_number(x, text):
    assert number(x) == text


def test_signed_numbers_show_the_plus():
    assert [number(x, signed=True) for x in (0.5, -0.5, 0.0, None, math.inf)] == ["+0.500", "-0.500", "0", "—", "+inf"]


def test_a_probability_ratio_keeps_the_digits_behind_the_one():
    assert [probability_ratio(x) for x in (1.0, 1.0000004, 1.04996, None)] == ["1", "1.0000", "1.0500", "—"]


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, "—"),
        (0.0, "0 %"),
        (1.0, "100 %"),
        (0.512, "51.2 %"),
        (0.9999, ">99.9 %"),
        (1e-9, "<0.1 %"),
        (0.001, "0.100 %"),
        (1.0001, ">100 %"),
        (math.nan, "nan"),
    ],
)
def test_percent_says_100_only_for_all_and_0_only_for_none(share, text):
    assert percent(share) == text


def test_counts():
    assert (count(12345), count(None), of(3, 1111), of(None, 5)) == ("12,345", "—", "3 of 1,111", "—")
    assert (plural(1, "token"), plural(0, "token"), plural(2000, "token")) == ("1 token", "0 tokens", "2,000 tokens")


@pytest.mark.parametrize(
    ("x", "text"),
    [(None, "none"), (True, "true"), (1e-06, "1e-06"), ([1, "a"], '[1, "a"]'), ("", '""'), ("x" * 200, "x" * 159 + "…"), ("a\tb", "a\\tb")],
)
def test_value_is_one_line_with_all_digits(x, text):
    assert value(x) == text


def test_printable_escapes_what_moves_the_cursor():
    assert printable("é日\x1b[2J\n\u202e") == "é日\\x1b[2J\\n\\u202e"


@pytest.mark.parametrize("x", [1.0911227707262, 3.721210496617667, 1e-7 / 3, 0.05, 1.0, 12345.678, 0.9999999])
def test_a_limit_is_short_and_its_value_is_within(x):
    upper, lower = passing_limit(x), passing_limit(x, at_least=True)
    assert x <= float(upper) <= x * 1.001
    assert x * 0.999 <= float(lower) <= x
    assert max(len(upper), len(lower)) <= len("3.334e-08")


def test_a_digest_is_cut_for_people():
    assert value("a1" * 32) == "a1a1a1a1a1a1…"
    assert value("a1" * 31) == "a1" * 31


@pytest.mark.parametrize("limit", ["token_mult_prob_error", "token_mult_prob_error (recorded)"])
def test_both_limits_of_the_mean_ratio_have_four_decimals(limit: str) -> None:
    line = BudgetLine(limit=limit, sense="at most", allowed=1.05, value=1.0004, status="within")
    assert [measures._limit(line, x) for x in (line.allowed, line.value)] == ["1.0500", "1.0004"]
