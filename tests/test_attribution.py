"""Attribution on models whose answer is known: additive drift, saturating drift like the one measured on real engines, and the traps.

One file of more than 400 lines: the models of drift at its top serve every test below.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import numpy as np
import pytest

from rlmismatch import attribution
from rlmismatch.attribution import ArmDrift, Attribution, search, shapley
from rlmismatch.attribution.model import within
from rlmismatch.errors import InconclusiveError
from rlmismatch.pins.spec import PINS

Pins = frozenset[str]
Model = Callable[[Pins], np.ndarray]  # pinned pins -> delta of every token, nats
LENGTHS = (30, 17, 40, 24)
TOKENS = sum(LENGTHS)


def draw(*key: object, scale: float = 1.0) -> np.ndarray:
    """Normal noise of a given size that depends only on the key."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big")
    return scale * np.random.default_rng(seed).standard_normal(TOKENS)


def additive(sizes: dict[str, float]) -> Model:
    """Each op adds its own independent error, whatever the others do: the shares are the squares of the sizes."""
    return lambda pinned: sum((draw(p, scale=s) for p, s in sizes.items() if p not in pinned and s), np.zeros(TOKENS))


CARRIED = {"norm": 0.8, "rope": 0.55, "attention": 0.5, "qk_norm": 0.45}  # part of the mean square that one released op alone brings back


def saturating(pinned: Pins, *, size: float = 2e-2, logprob: float = 7e-8) -> np.ndarray:
    """The first op that rounds differently makes all after it differ; then further ones hardly add. The rounding is new in every arm."""
    released = tuple(p for p in CARRIED if p not in pinned)
    square = size**2 * (1 - math.prod(1 - CARRIED[p] for p in released))
    noise = draw(released)
    noise = (noise - noise.mean()) / noise.std()  # its mean square is exactly what the formula says
    return math.sqrt(square) * noise + (draw("logprob", scale=logprob) if "logprob" not in pinned else 0)


def measure(model: Model, arm: Pins) -> ArmDrift:
    return ArmDrift.of(np.split(model(arm), np.cumsum(LENGTHS)[:-1]))


def run(model: Model, players: Sequence[str], *, floor: float = 0.0, seed: int = 0, **options: object) -> tuple[Attribution, list[int]]:
    """Play the caller: run the arms that are asked for until none is, checking that no arm is asked twice and the bound holds."""
    table: dict[Pins, ArmDrift] = {}
    bounds = []
    for _ in range(40):
        bounds.append(attribution.expected_arms(table, players, floor=floor, seed=seed))
        arms = attribution.next_arms(table, players, floor=floor, seed=seed)
        if not arms:
            break
        assert len(set(arms)) == len(arms)
        assert not set(arms) & set(table)
        table.update({arm: measure(model, arm) for arm in arms})
    else:
        pytest.fail("the search does not end")
    assert all(len(table) <= bound for bound in bounds)
    return attribution.attribute(table, players, floor=floor, seed=seed, **options), bounds  # type: ignore[arg-type]


def player(result: Attribution, pin: str) -> attribution.Player:
    return next(p for p in result.players if p.pin == pin)


def total_share(result: Attribution) -> float:
    return math.fsum(p.share for p in result.players if p.share is not None)


class TestRounds:
    def test_the_first_round_is_native_all_alone_and_last(self) -> None:
        a, b, c = "norm", "rope", "gemm"
        arms = attribution.next_arms({}, (a, b, c))
        assert arms[:2] == (frozenset(), frozenset({a, b, c}))
        assert set(arms[2:]) == {frozenset(s) for s in ([a], [b], [c], [b, c], [a, c], [a, b])}
        assert len(arms) == 8

    def test_a_first_round_of_one_or_two_players_has_no_arm_twice(self) -> None:
        assert attribution.next_arms({}, ("norm",)) == (frozenset(), frozenset({"norm"}))
        assert len(attribution.next_arms({}, ("norm", "rope"))) == 4

    def test_an_answer_from_half_a_table_is_refused(self) -> None:
        table = {arm: measure(saturating, arm) for arm in attribution.next_arms({}, PINS)}
        with pytest.raises(InconclusiveError) as error:
            attribution.attribute(table, PINS)
        assert error.value.slug == "attribution-incomplete"

    def test_arms_that_scored_other_tokens_are_refused(self) -> None:
        table = {frozenset[str](): ArmDrift.of([[0.1, 0.2]]), frozenset({"norm"}): ArmDrift.of([[0.1]])}
        with pytest.raises(ValueError, match="same tokens"):
            attribution.next_arms(table, ("norm",))

    @pytest.mark.parametrize("players", [(), ("norm", "norm")])
    def test_players_must_be_different_and_at_least_one(self, players: tuple[str, ...]) -> None:
        with pytest.raises(ValueError, match="players"):
            attribution.next_arms({}, players)


class TestArmDrift:
    def test_sums(self) -> None:
        summary = ArmDrift.of([[0.5, -0.25], [], [0.0, 1e-300]]).summary()
        assert (summary.tokens, summary.unequal) == (4, 3), "a difference whose square underflows is still a difference"
        assert summary.mean_abs == pytest.approx(0.1875)
        assert summary.signed_mean == pytest.approx(0.0625)
        assert summary.mean_squared == pytest.approx(0.078125)
        assert summary.max_abs == 0.5

    def test_the_smallest_difference_is_not_bit_equal(self) -> None:
        summary = ArmDrift.of([[5e-324, 0.0]]).summary()
        assert summary.mean_abs == 0.0, "it underflows"
        assert not within(summary, 0.0)

    @pytest.mark.parametrize("deltas", [[[0.1, math.nan]], [[math.inf]]])
    def test_nan_and_infinity_never_enter(self, deltas: list[list[float]]) -> None:
        with pytest.raises(InconclusiveError) as error:
            ArmDrift.of(deltas)
        assert error.value.slug == "drift-not-finite"

    @pytest.mark.parametrize("deltas", [[], [[], []]])
    def test_no_token_is_no_arm(self, deltas: list[list[float]]) -> None:
        with pytest.raises(InconclusiveError) as error:
            ArmDrift.of(deltas)
        assert error.value.slug == "nothing-compared"

    def test_columns_must_fit(self) -> None:
        with pytest.raises(ValueError, match="one entry per sequence"):
            ArmDrift(tokens=(1, 1), unequal=(0,), sum_abs=(0.0,), sum_squared=(0.0,), sum_signed=(0.0,), max_abs=(0.0,))


class TestSaturating:
    """The case that one-knob-at-a-time can not solve, as measured on the mid fixture."""

    def test_the_model_is_like_the_measured_one(self) -> None:
        native = measure(saturating, frozenset()).summary()
        every = frozenset(PINS)
        last = {p: measure(saturating, every - {p}).summary() for p in CARRIED}
        assert sum(s.mean_squared for s in last.values()) > 2 * native.mean_squared
        assert all(s.mean_abs > 0.5 * native.mean_abs for s in last.values())
        for three in itertools.combinations(CARRIED, 3):
            assert measure(saturating, frozenset(three)).summary().mean_abs > 0.5 * native.mean_abs
        assert measure(saturating, frozenset(CARRIED)).summary().mean_abs < 1e-7

    def test_the_fix_set_is_found_proved_and_minimal(self) -> None:
        result, _ = run(saturating, PINS)
        assert result.status == "attributed"
        assert result.closed
        assert result.target == 0.0
        assert result.fix_set == ("norm", "qk_norm", "rope", "attention", "logprob")
        assert result.zero_set == ("gemm", "forward_reduce", "activation", "head_gemm")
        assert not result.widened
        assert result.proved
        assert result.fix_drift is not None
        assert result.fix_drift.bit_equal
        assert tuple(d.pin for d in result.drops) == result.fix_set
        assert all(not d.drift.bit_equal for d in result.drops)
        assert result.remainder.bit_equal

    def test_shares_add_to_one_and_rank_the_ops(self) -> None:
        result, _ = run(saturating, PINS)
        assert result.share_orders == 0
        assert total_share(result) == pytest.approx(1.0, abs=1e-12)
        share = {p.pin: p.share for p in result.players}
        truth = shapley.exact(tuple(CARRIED), lambda pinned: np.array(1 - math.prod(1 - s for p, s in CARRIED.items() if p not in pinned)))
        for pin, value in zip(CARRIED, truth.value / truth.value.sum(), strict=True):
            assert share[pin] == pytest.approx(value, abs=1e-4)
        assert max(CARRIED, key=lambda p: share[p] or 0.0) == "norm"
        assert abs(share["logprob"] or 1.0) < 1e-4
        assert [p for p in result.zero_set if share[p] is not None] == []
        for pin in result.fix_set:
            interval = player(result, pin).share_interval
            assert interval is not None
            assert interval.low <= interval.high

    def test_it_needs_three_rounds_and_few_arms(self) -> None:
        result, bounds = run(saturating, PINS)
        assert len(bounds) == 4
        assert bounds == sorted(bounds, reverse=True)
        assert bounds[0] <= 2 ** len(PINS)
        assert bounds[-1] == result.arms < 60

    def test_alone_and_last_stand_beside(self) -> None:
        result, _ = run(saturating, PINS)
        every = frozenset(PINS)
        assert player(result, "rope").alone == measure(saturating, frozenset({"rope"})).summary().mean_abs
        assert player(result, "rope").last == measure(saturating, every - {"rope"}).summary().mean_abs
        assert player(result, "gemm").last == 0.0

    def test_the_same_seed_gives_the_same_answer(self) -> None:
        assert run(saturating, PINS, seed=3)[0] == run(saturating, PINS, seed=3)[0]


class TestAdditive:
    SIZES: ClassVar = {"norm": 3e-3, "rope": 2e-3, "attention": 1e-3, "gemm": 0.0}

    def test_shares_are_the_squares(self) -> None:
        result, _ = run(additive(self.SIZES), tuple(self.SIZES))
        assert result.fix_set == ("norm", "rope", "attention")
        assert result.zero_set == ("gemm",)
        for pin, size in self.SIZES.items():
            if size:
                assert player(result, pin).share == pytest.approx(size**2 / 14e-6, abs=0.1)
        assert total_share(result) == pytest.approx(1.0, abs=1e-12)

    def test_one_player_takes_all(self) -> None:
        result, _ = run(additive({"norm": 1e-3}), ("norm",))
        assert result.fix_set == ("norm",)
        assert player(result, "norm").share == pytest.approx(1.0)
        assert result.drops[0].drift == result.native

    def test_beyond_six_members_orders_are_sampled_with_an_error(self) -> None:
        sizes = {p: 1e-3 * (1 + i % 3) for i, p in enumerate(PINS)}
        result, _ = run(additive(sizes), PINS, seed=1)
        assert len(result.fix_set) == 9 > search.EXACT_UP_TO
        assert result.share_orders is not None
        assert 2 <= result.share_orders <= search.MAX_ORDERS
        assert total_share(result) == pytest.approx(1.0, abs=1e-12)
        model = additive(sizes)
        truth = shapley.exact(PINS, lambda pinned: np.array(np.var(model(pinned))))
        truth_share = truth.value / truth.value.sum()
        for i, pin in enumerate(PINS):
            found = player(result, pin)
            assert found.share is not None
            assert found.share_error is not None
            assert abs(found.share - truth_share[i]) < 5 * max(found.share_error, 1e-3)

    def test_sampling_stops_when_the_error_is_small(self) -> None:
        """Orthogonal errors leave nothing to the order of joining: the first round of orders is enough."""

        def orthogonal(pinned: Pins) -> np.ndarray:
            out = np.zeros(TOKENS)
            for i, p in enumerate(PINS):
                if p not in pinned:
                    out[2 * i], out[2 * i + 1] = 1e-3, -1e-3
            return out

        result, _ = run(orthogonal, PINS)
        assert result.share_orders == search.ORDERS_PER_ROUND
        assert [p.share for p in result.players] == pytest.approx([1 / 9] * 9)


class TestTraps:
    def test_an_axis_that_alone_does_nothing_but_is_needed(self) -> None:
        def both(pinned: Pins) -> np.ndarray:
            return np.zeros(TOKENS) if {"norm", "rope"} <= pinned else draw("x", scale=1e-2)

        result, _ = run(both, ("norm", "rope", "gemm"))
        assert player(result, "norm").alone == result.native.mean_abs
        assert result.fix_set == ("norm", "rope")
        assert result.zero_set == ("gemm",)
        assert [p.share for p in result.players[:2]] == pytest.approx([0.5, 0.5])
        assert result.proved

    def test_two_that_can_stand_in_for_each_other_are_not_cleared(self) -> None:
        def either(pinned: Pins) -> np.ndarray:
            return np.zeros(TOKENS) if {"gemm", "forward_reduce"} & pinned else draw("x", scale=1e-2)

        result, _ = run(either, ("norm", "gemm", "forward_reduce"))
        assert all(p.last == 0.0 for p in result.players), "released last, each is covered by the other"
        assert result.widened
        assert result.fix_set == ("gemm",)
        assert player(result, "forward_reduce").role == "interchangeable"
        assert player(result, "forward_reduce").stands_in_for == ("gemm",)
        assert result.zero_set == ("norm",)
        assert result.proved

    def test_a_stand_in_beside_a_member_that_comes_back(self) -> None:
        def mixed(pinned: Pins) -> np.ndarray:
            return additive({"rope": 1e-2})(pinned) + (0 if {"gemm", "forward_reduce"} & pinned else draw("x", scale=1e-2))

        result, _ = run(mixed, ("norm", "gemm", "forward_reduce", "rope"))
        assert result.widened
        assert set(result.fix_set) in ({"gemm", "rope"}, {"forward_reduce", "rope"})
        assert result.zero_set == ("norm",)
        assert result.proved
        assert total_share(result) == pytest.approx(1.0)

    def test_pins_that_bring_back_something_yet_are_not_needed(self) -> None:
        """Not monotone: with all others pinned, releasing gemm hurts; with only norm pinned, it does not."""

        def odd(pinned: Pins) -> np.ndarray:
            if "norm" not in pinned:
                return draw("x", scale=1e-2)
            return draw("y", scale=1e-3) if pinned == {"norm", "rope"} else np.zeros(TOKENS)

        result, _ = run(odd, ("norm", "gemm", "rope"))
        assert result.fix_set == ("norm",)
        assert player(result, "gemm").role == "not needed"
        assert result.proved

    def test_a_local_error_vetoes_clearing(self) -> None:
        result, _ = run(saturating, PINS, local={"gemm": 3e-4, "activation": 0.0, "head_gemm": None, "forward_reduce": math.nan})
        assert result.zero_set == ("activation", "head_gemm")
        assert player(result, "gemm").role == "local error"
        assert player(result, "gemm").local == 3e-4
        assert player(result, "forward_reduce").role == "local error"

    def test_no_drift_says_so(self) -> None:
        result, bounds = run(lambda _: np.zeros(TOKENS), ("norm", "rope"))
        assert result.status == "no drift"
        assert len(bounds) == 2
        assert result.fix_set == ()
        assert result.fix_drift is None
        assert not result.proved
        assert [p.share for p in result.players] == [None, None]
        assert result.zero_set == ("norm", "rope")
        assert result.systematic_fraction == 0.0

    def test_a_missing_axis_leaves_a_remainder_and_the_fix_set_reaches_it(self) -> None:
        def more(pinned: Pins) -> np.ndarray:
            return saturating(pinned) + draw("nobody", scale=1e-4)

        result, _ = run(more, PINS)
        assert result.status == "attributed"
        assert not result.closed
        assert result.remainder.mean_abs == pytest.approx(1e-4 * math.sqrt(2 / math.pi), rel=0.2)
        assert result.target == 2 * result.remainder.mean_abs
        assert set(result.fix_set) == set(CARRIED)
        assert result.proved
        assert result.zero_set == ("gemm", "forward_reduce", "activation", "head_gemm"), "exactly the remainder's bits, no more"
        assert player(result, "logprob").role == "not needed"
        assert total_share(result) == pytest.approx(1.0)

    def test_pins_that_explain_nothing(self) -> None:
        result, _ = run(lambda pinned: draw(tuple(sorted(pinned)), scale=1e-2), ("norm", "rope"))
        assert result.status == "unexplained"
        assert not result.closed
        assert result.fix_set == ()
        assert result.zero_set == ()

    def test_a_noise_floor_blames_nobody_for_it(self) -> None:
        floor = 1e-4

        def noisy(pinned: Pins) -> np.ndarray:
            return additive({"norm": 1e-2, "rope": 5e-3, "gemm": 1e-5})(pinned) + draw("noise", tuple(sorted(pinned)), scale=floor)

        result, _ = run(noisy, ("norm", "rope", "gemm", "activation"), floor=floor * math.sqrt(2 / math.pi))
        assert result.closed
        assert result.fix_set == ("norm", "rope")
        assert player(result, "gemm").role == "not needed"
        assert result.proved
        assert total_share(result) == pytest.approx(1.0)

    def test_a_drift_at_the_floor_is_no_drift(self) -> None:
        result, _ = run(lambda pinned: draw(tuple(sorted(pinned)), scale=1e-4), ("norm", "rope"), floor=1e-4)
        assert result.status == "no drift"


class TestSystematic:
    def test_a_bias_is_split_off_before_shares_are_made(self) -> None:
        bias = 0.3

        def biased(pinned: Pins) -> np.ndarray:
            return additive({"norm": 1e-2, "rope": 1e-2})(pinned) + (0.0 if "logprob" in pinned else bias)

        result, _ = run(biased, ("norm", "rope", "logprob"))
        assert result.systematic_fraction > 0.99
        assert player(result, "logprob").systematic == pytest.approx(bias, abs=1e-12)
        assert player(result, "logprob").share == pytest.approx(0.0, abs=1e-9)
        assert player(result, "norm").share == pytest.approx(0.5, abs=0.15)
        assert math.fsum(p.systematic or 0.0 for p in result.players) == pytest.approx(result.native.signed_mean)

    def test_nothing_but_a_bias_has_no_shares_and_does_not_divide_by_zero(self) -> None:
        result, _ = run(lambda pinned: np.zeros(TOKENS) if "logprob" in pinned else np.full(TOKENS, 0.5), ("norm", "logprob"))
        assert result.fix_set == ("logprob",)
        assert player(result, "logprob").systematic == 0.5
        assert player(result, "logprob").share is None
        assert player(result, "logprob").share_interval is None


class TestIntervals:
    def test_one_sequence_has_no_spread(self) -> None:
        players = ("norm", "rope")
        model = additive({"norm": 1e-2, "rope": 1e-2})
        table: dict[Pins, ArmDrift] = {}
        while arms := attribution.next_arms(table, players):
            table.update({arm: ArmDrift.of([model(arm)]) for arm in arms})
        result = attribution.attribute(table, players)
        assert all(p.share is not None and p.share_interval is None for p in result.players)

    def test_sequences_that_disagree_widen_the_interval(self) -> None:
        def split(pinned: Pins) -> np.ndarray:
            out = np.zeros(TOKENS)
            sizes = {"norm": slice(0, LENGTHS[0]), "rope": slice(LENGTHS[0], None)}
            for p, where in sizes.items():
                if p not in pinned:
                    out[where] = draw(p, scale=1e-2)[where]
            return out

        wide, _ = run(split, ("norm", "rope"))
        narrow, _ = run(additive({"norm": 1e-2, "rope": 1e-2}), ("norm", "rope"))

        def width(result: Attribution) -> float:
            interval = player(result, "norm").share_interval
            assert interval is not None
            return interval.high - interval.low

        assert width(wide) > 2 * width(narrow)


class TestRandomSystems:
    """Any monotone system: the answer closes, no member can go, and nothing that is cleared would have mattered."""

    @pytest.mark.parametrize("seed", range(30))
    def test_the_fix_set_is_one_minimal(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        players = PINS[: int(rng.integers(2, 8))]
        clauses = [frozenset(rng.choice(players, size=int(rng.integers(1, 4)))) for _ in range(int(rng.integers(1, 4)))]

        def model(pinned: Pins) -> np.ndarray:
            broken = tuple(i for i, c in enumerate(clauses) if not c & pinned)  # closed when every clause has a pin in force
            return draw(broken, scale=1e-2) if broken else np.zeros(TOKENS)

        def closes(pins: Iterable[str]) -> bool:
            return all(c & set(pins) for c in clauses)

        result, _ = run(model, players)
        assert closes(result.fix_set)
        assert not any(closes(set(result.fix_set) - {p}) for p in result.fix_set)
        assert result.proved
        assert total_share(result) == pytest.approx(1.0)
        assert not set(result.zero_set) & set(result.fix_set)


class TestBound:
    @pytest.mark.parametrize("seed", range(6))
    def test_it_holds_where_the_search_is_long(self, seed: int) -> None:
        """Fourteen pins and clauses of four, so that every pin is covered when it is released last; `run` checks the bound every round."""
        rng = np.random.default_rng(seed)
        players = tuple(f"p{i}" for i in range(14))
        clauses = [frozenset(rng.choice(players, size=4, replace=False)) for _ in range(5)]

        def model(pinned: Pins) -> np.ndarray:
            broken = tuple(i for i, c in enumerate(clauses) if not c & pinned)
            return draw(broken, scale=1e-2) if broken else np.zeros(TOKENS)

        result, bounds = run(model, players)
        assert result.widened
        assert result.proved
        assert bounds[0] < 2**14
        assert len(bounds) < 15


class TestShapley:
    def test_exact_is_the_mean_over_all_orders(self) -> None:
        members = ("a", "b", "c", "d")
        left = {s: np.random.default_rng(i).random(2) for i, s in enumerate(shapley.subsets(members))}
        every = list(itertools.permutations(members))
        found = shapley.exact(members, left.__getitem__)
        want = shapley.sampled(members, left.__getitem__, every)
        assert np.allclose(found.value, want.value, rtol=0, atol=1e-14)
        assert np.allclose(found.value.sum(axis=0), left[frozenset()] - left[frozenset(members)], rtol=0, atol=1e-14)
        assert not found.error.any()

    def test_orders_are_repeatable_and_grow_at_the_end(self) -> None:
        assert shapley.orders("abc", 8, seed=5)[:4] == shapley.orders("abc", 4, seed=5)
        assert shapley.orders("abcdef", 8, seed=5) != shapley.orders("abcdef", 8, seed=6)
        assert {frozenset(o) for o in shapley.orders("abc", 8, seed=5)} == {frozenset("abc")}

    def test_one_order_has_no_error_and_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 2"):
            shapley.sampled(("a",), lambda _: np.zeros(1), [("a",)])
