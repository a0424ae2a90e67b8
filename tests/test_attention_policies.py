"""Attention by other arithmetic: every policy is the formula up to its roundings, and tells itself apart from every other one."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from rlmismatch import attention_policies as policies
from rlmismatch.attention_policies import POLICIES, Operands, Policy

TOKENS, HEADS, KV_HEADS, DIM = 150, 4, 2, 32


@pytest.fixture(scope="module")
def given() -> Operands:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(TOKENS, n, DIM, generator=generator).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS))
    return Operands(q_THD=q, k_THD=k, v_THD=v, scale=DIM**-0.5)


def last_rows(given: Operands, rows: int) -> Operands:
    return dataclasses.replace(given, q_THD=given.q_THD[-rows:])


def by_hand(given: Operands, row: int, head: int) -> torch.Tensor:
    """float64 [D]: one row of one head, written out."""
    kv = head // (HEADS // KV_HEADS)
    score = given.k_THD[: row + 1, kv].double() @ given.q_THD[row, head].double() * given.scale
    return (score - score.logsumexp(0)).exp() @ given.v_THD[: row + 1, kv].double()


def test_exact_is_causal_softmax_attention(given: Operands) -> None:
    out = policies.exact(given)
    for row, head in itertools.product((0, 1, 77, TOKENS - 1), range(HEADS)):
        torch.testing.assert_close(out[row, head], by_hand(given, row, head), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("window", [1, 40, TOKENS])
def test_a_window_counts_the_token_itself(given: Operands, window: int) -> None:
    out = policies.exact(dataclasses.replace(given, window=window))
    row, first = 77, max(0, 78 - window)
    seen = dataclasses.replace(
        given, q_THD=given.q_THD[row : row + 1], k_THD=given.k_THD[first : row + 1], v_THD=given.v_THD[first : row + 1]
    )
    torch.testing.assert_close(out[row], policies.exact(seen)[0], rtol=1e-12, atol=1e-14)
    windowed = dataclasses.replace(given, window=window)
    merged = policies.merge(policies.partials(windowed, policies.even_bounds(TOKENS, 4))).transpose(0, 1)
    torch.testing.assert_close(merged.double(), out, rtol=0, atol=4e-6)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_policy_is_the_formula_up_to_its_roundings(given: Operands, policy: Policy) -> None:
    out, truth = policies.simulate(given, policy), policies.exact(given)
    assert out.dtype is torch.bfloat16
    casts = 1 + (TOKENS // policy.block if policy.block else 0)
    assert float((out.double() - truth).abs().mean() / truth.abs().mean()) < 2.0**-8 * (2 + casts)


def test_no_two_policies_are_one(given: Operands) -> None:
    outputs = [policies.simulate(given, policy) for policy in POLICIES]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(outputs, 2))
    assert len({str(policy) for policy in POLICIES}) == len(POLICIES)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(given: Operands, policy: Policy) -> None:
    """Blocks lie at absolute positions: decode and chunks give the bits of the whole."""
    whole = policies.simulate(given, policy)
    for rows in (1, 33):
        assert torch.equal(policies.simulate(last_rows(given, rows), policy), whole[-rows:])


@pytest.mark.parametrize("bounds", [[0, 150], [0, 64, 128, 150], [0, 1, 150]])
def test_partials_merge_to_the_whole(given: Operands, bounds: list[int]) -> None:
    parts = policies.partials(given, bounds)
    truth = policies.exact(given).transpose(0, 1)
    for order in policies.orders(len(parts)):
        merged = policies.merge([parts[i] for i in order])
        assert merged.dtype is torch.float32
        torch.testing.assert_close(merged.double(), truth, rtol=0, atol=4e-6)


def test_a_partial_of_unseen_keys_is_empty(given: Operands) -> None:
    late = policies.partials(given, [0, 100, 150])[1]
    assert torch.isneginf(late.lse_HT[:, :100]).all()
    assert (late.out_HTD[:, :100] == 0).all()
    assert late.lse_HT[:, 100:].isfinite().all()


def test_orders_are_all_of_a_few_and_a_sample_of_many() -> None:
    assert len(list(policies.orders(4))) == 24
    many = list(policies.orders(8))
    assert len(many) == policies.MAX_ORDERS
    assert many[0] == tuple(range(8))
    assert all(sorted(order) == list(range(8)) for order in many)
    assert many == list(policies.orders(8))


def test_the_merge_order_moves_the_last_bits(given: Operands) -> None:
    parts = policies.partials(given, policies.even_bounds(TOKENS, 4))
    found = [policies.merge([parts[i] for i in order]) for order in policies.orders(4)]
    assert any(not torch.equal(x, found[0]) for x in found)


def test_the_first_heads_keep_their_groups(given: Operands) -> None:
    few = given.first_heads(10, 3)
    assert (few.q_THD.shape, few.k_THD.shape) == ((10, 2, DIM), (10, 1, DIM))
    torch.testing.assert_close(policies.exact(few), policies.exact(given)[:10, :2], rtol=0, atol=1e-14)
