"""What the rollout's live engine does, found by asking it: short trials with known inputs, for what no attribute shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from rlmismatch import float64
from rlmismatch.contract import Reading, read, unknown
from rlmismatch.engines.logprob_knobs import planted_chain, rounding_nats, rows_made_of, trial_targets
from rlmismatch.engines.logprob_plants import owner_twice
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.pins.vllm_live import LiveModel
from rlmismatch.pins.vllm_logprob import engine_steps
from rlmismatch.transforms import Chain, candidates

_ROWS: Final = 8
_POSITIONS: Final = 4096  # of the rotary table that are compared
_ANGLE_ERROR: Final = 1e-3  # radians at position 4096, for a float32 frequency that is off by two units in its last place
_SAME_NATS: Final = 1e-7
_TOLERANCE_NATS: Final = 1e-4  # float32 log-softmax over 1e5 columns is good to 1e-5; the candidates lie 1e-2 and more apart


@dataclass(frozen=True, kw_only=True)
class ScoreBehaviour:
    """How the live log-softmax treats logits. `offset`: a constant, in nats, by which its log-sum-exp is too large."""

    chain: Reading
    offset: Reading
    padding: Reading  # include | mask, of what the log-softmax itself adds
    single_owner: Reading
    columns: Reading  # of the real vocabulary that the denominator counts


def score(live: LiveModel, dtype: torch.dtype, config: SideConfig) -> ScoreBehaviour:
    """Put synthetic logits through the live log-softmax and name the one list of transforms that gives its values.

    Rows have different scales, so that no two lists differ by a mere constant; the targets are likely tokens, which no transform cuts
    off. What the logits processor does before is read from its attributes.
    """
    source = "trial: synthetic logits through sampler.compute_logprobs"
    generator = torch.Generator().manual_seed(0)
    logits_TV = (torch.randn(_ROWS, live.vocab_size, generator=generator) * torch.linspace(0.5, 3.0, _ROWS)[:, None]).to(dtype)
    processor = live.model.logits_processor
    own = Chain.of({"soft_cap": float(processor.soft_cap or 0.0), "logit_scale": float(processor.scale)})
    asked, planted = (engine_steps(c)[1] for c in (live.chain, planted_chain(live.chain, config.plants)))
    targets_T = trial_targets(logits_TV, planted)
    live_T = _live_logprob(live, logits_TV, targets_T)
    pads = int(live.model.lm_head.num_embeddings_padded) - live.vocab_size
    widths = {"mask": 0, "include": pads} if pads else {"mask": 0}
    tried: list[tuple[float, float, bool, str, Chain, float]] = []
    for chain in candidates(asked, planted, Chain()):
        for padding, width in widths.items():
            x_TV = chain.apply(torch.nn.functional.pad(logits_TV.double(), (0, width)))
            exact_T = float64.log_softmax(x_TV).gather(1, targets_T[:, None])[:, 0]
            for single in (True, False):
                difference_T = live_T - (exact_T if single else exact_T + owner_twice(x_TV, targets_T))
                spread, offset = float(difference_T.max() - difference_T.min()), -float(difference_T.mean())
                tried.append((spread, offset, single, padding, chain, rounding_nats(x_TV)))
    # Of lists that are one function the first stands, which is the one asked for.
    spread, offset, single, padding, chain, lost = next(t for t in tried if not t[0] > min(x[0] for x in tried) + _SAME_NATS)
    # Absolute where logits are of ordinary size, and what rounding takes of large ones.
    tolerance = _TOLERANCE_NATS + lost
    # Of what rounding alone may be, nothing stands in equal logits.
    too_large = offset if spread <= tolerance and abs(offset) > lost else 0.0
    counted = _live_logprob(live, torch.zeros_like(logits_TV), torch.arange(1, _ROWS + 1) % live.vocab_size)
    columns = read(
        round(float(torch.exp(-counted.mean() - too_large))) - widths[padding], "trial: equal logits through sampler.compute_logprobs"
    )
    if not planted.elementwise or not chain.elementwise:
        columns = read(live.vocab_size, "config.json: a truncated distribution has no equal columns to count")
    if spread <= tolerance:
        before = f"logits_processor.soft_cap, scale; {source}" if own.steps else source
        return ScoreBehaviour(
            chain=read(own.texts + chain.texts, before),
            offset=read(offset if abs(offset) > tolerance else 0.0, source),
            padding=read(padding, source),
            single_owner=read(single, source),
            columns=columns,
        )
    nothing = unknown(f"{source}: the values match no known transform")
    return ScoreBehaviour(chain=nothing, offset=nothing, padding=nothing, single_owner=nothing, columns=columns)


def backend(live: LiveModel, dtype: torch.dtype, config: SideConfig) -> Reading:
    """The sampler's mode, if its own log-softmax gives the live one's bits: another one may run under the same name."""
    hooked = engine_steps(planted_chain(live.chain, config.plants))[1]
    logits_TV = torch.randn(_ROWS, live.vocab_size, generator=torch.Generator().manual_seed(0)).to(live.inv_freq.device, dtype)
    own_TV = type(live.sampler).compute_logprobs(hooked.apply(logits_TV.float()) if hooked.steps else logits_TV)
    same = torch.equal(live.sampler.compute_logprobs(logits_TV), own_TV)
    source = "sampler.logprobs_mode; trial: bits of its log-softmax"
    return read(str(live.sampler.logprobs_mode) if same else "another log-softmax than the sampler's", source)


def _live_logprob(live: LiveModel, logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """float64 [T] on the CPU: what the live log-softmax and its gather make of given logits, row by row as decode does it."""
    device = live.inv_freq.device
    logp_TV = live.sampler.compute_logprobs(logits_TV.to(device))
    rows = [
        live.sampler.gather_logprobs(logp_TV[t : t + 1], 0, targets_T[t : t + 1].to(device)).logprobs[:, 0] for t in range(len(targets_T))
    ]
    return torch.cat(rows).cpu().double()


def head_rows(live: LiveModel, dtype: torch.dtype) -> Reading:
    """Which hidden row each row of logits is made of, from unequal rows through the live head. Collective."""
    weight_VH = torch.cat(live.tp.gathered(live.weight(live.model.lm_head)))[: live.vocab_size]
    x_TH = torch.randn(4, weight_VH.shape[1], generator=torch.Generator().manual_seed(0)).to(weight_VH)
    with torch.inference_mode():
        logits_TV = live.model.logits_processor._get_logits(x_TH, live.model.lm_head, None)
    return rows_made_of(logits_TV, x_TH, weight_VH, "trial: four unequal rows through the head")


def logits(live: LiveModel, dtype: torch.dtype) -> torch.Tensor:
    """The live logits [1, columns] of a hidden state of zeros. Collective."""
    hidden_TH = torch.zeros(1, live.model.lm_head.embedding_dim, dtype=dtype, device=live.inv_freq.device)
    with torch.inference_mode():
        out: torch.Tensor = live.model.compute_logits(hidden_TH)
    return out


def qk_norm_acts(live: LiveModel, dtype: torch.dtype) -> Reading:
    """Whether the live q/k norms change a vector that is not normalised, in every layer. False for a model without them."""
    norms: list[Any] = [n for layer in live.layers for n in (layer.self_attn.q_norm, layer.self_attn.k_norm)]
    x_THD = torch.full((1, 1, 2 * live.inv_freq.numel()), 3.0, dtype=dtype, device=live.inv_freq.device)
    with torch.inference_mode():
        acts = {not torch.equal(norm(x_THD), x_THD) for norm in norms}
    source = "trial: a constant vector through every q_norm and k_norm"
    return read(acts.pop(), source) if len(acts) == 1 else unknown(f"{source}: some act and some do not")


def fitted_theta(live: LiveModel) -> Reading:
    """The rotary base that the live cos/sin table was made with: `base` if it reproduces the table, else one fitted to the table."""
    rotary = live.layers[0].self_attn.rotary_emb
    made_PR, live_PR = (t[:_POSITIONS].cpu().float() for t in (rotary._compute_cos_sin_cache(), rotary.cos_sin_cache))
    # A factor on cos and sin is another field's matter: it shows at position 0, where cos is 1.
    live_PR = live_PR / live_PR[0, 0]
    # The live table was made on the model's device: its pow and cos may round differently, and the result once more.
    rounding = 2.0 * torch.finfo(rotary.cos_sin_cache.dtype).eps + _ANGLE_ERROR
    if made_PR.shape == live_PR.shape and float((made_PR - live_PR).abs().max()) <= rounding:
        return read(float(rotary.base), "rotary_emb.base, which reproduces rotary_emb.cos_sin_cache")
    # sin and cos of the second frequency at position 1; 1 / frequency = theta ** (2 / rotary_dim).
    half = rotary.rotary_dim // 2
    cos, sin = (float(rotary.cos_sin_cache[1, i]) for i in (1, half + 1))
    theta = float(torch.atan2(torch.tensor(sin), torch.tensor(cos)).double() ** -half)
    return read(float(f"{theta:.3g}"), "fitted to rotary_emb.cos_sin_cache, which rotary_emb.base does not reproduce")
