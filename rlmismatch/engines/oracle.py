"""The float64 oracle: transformers' own model with every rounding below float64 taken out. It is what both engines are judged by.

transformers casts to float32 in three places whatever the model's dtype: RMSNorm, the softmax of eager attention, and the rotary
angles. All three are replaced on this model only, and every operation of the forward pass is watched: one that yields another
floating dtype is an error, so that a later transformers with a fourth cast can not pass unseen.

What stays rounded is the model itself: the weights as the engines hold them (rounded to the run's dtype), and the float32 inverse
frequencies, which are part of the checkpoint's definition in both engines. Where path ``plain`` is asked for, the untouched model in
the run's dtype is scored as well: its error is the yardstick for an engine's.
"""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlmismatch.checkpoint import Checkpoint, digest
from rlmismatch.contract import Reading
from rlmismatch.engines import attention_sinks
from rlmismatch.engines.logprob_knobs import CHAIN_KNOBS, chain_of
from rlmismatch.engines.protocol import Arm, ArmResult, SideConfig
from rlmismatch.errors import EngineError, EnvironmentUnfitError, UsageError
from rlmismatch.tokens import Prompt, Sequence, check_ids

# Shapes: T tokens of one sequence, H query heads, D head dim, V vocabulary, R response tokens; 1 is a batch of one.
_ATTENTION: Final = "rlmismatch_exact"  # transformers' name for `_exact_attention`
_PLAIN_SINK: Final = "rlmismatch_plain_sink"  # for the plain forward where there is a sink
_QUERY_BLOCK: Final = 256  # query rows a step; bounds the memory, not the result
_HEAD_BLOCK: Final = 256  # rows of the lm_head a step


class OracleEngine:
    """`engines.protocol.Engine` on one rank, without torch.distributed. It has no pins, no probes and no fusions."""

    def __init__(self, config: SideConfig, *, rank: int = 0, local_rank: int = 0) -> None:
        if config.world_size != 1:
            raise UsageError("oracle-is-one-rank", f"the oracle runs on one rank, not TP{config.tp} CP{config.cp}", where="oracle")
        if config.plants or config.knobs.keys() - CHAIN_KNOBS - {attention_sinks.KNOB}:
            raise UsageError(
                "oracle-takes-no-plants", "the oracle takes no plant, and no knob but the transforms and the sink", where="oracle"
            )
        self.config = config
        self._checkpoint: Checkpoint | None = None
        self._plain: Any = None
        self._exact: Any = None

    def load(self) -> None:
        """Load the checkpoint in the run's dtype, and a copy of it in the oracle's."""
        self._checkpoint = Checkpoint.open(self.config.ckpt)
        try:
            from transformers import AttentionInterface, AutoModelForCausalLM
        except ImportError as error:
            raise EnvironmentUnfitError(
                "engine-not-installed", f"the oracle needs transformers: {error}", where="oracle", hint="pip install 'rlmismatch[megatron]'"
            ) from None
        with _no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                self.config.ckpt,
                dtype=getattr(torch, self.config.dtype),
                attn_implementation="eager",
                use_safetensors=True,
                local_files_only=True,
            )
        self._plain = model.to(self.config.device).eval()
        sink = attention_sinks.asked(self.config)
        AttentionInterface.register(_ATTENTION, functools.partial(_exact_attention, sink=sink))
        self._exact = copy.deepcopy(self._plain).to(getattr(torch, self.config.oracle_dtype))
        self._exact.set_attn_implementation(_ATTENTION)
        if sink is not None:  # transformers' own attention of these models takes none
            AttentionInterface.register(_PLAIN_SINK, functools.partial(_exact_attention, sink=sink, softmax_dtype=torch.float32))
            self._plain.set_attn_implementation(_PLAIN_SINK)
        _take_out_casts(self._exact)

    def readings(self) -> Mapping[str, Mapping[str, Reading]]:
        """Nothing: the oracle is no side of the contract."""
        return {}

    def weight_digests(self) -> Mapping[str, str]:
        """Digests of the plain model's live parameters under their HF names, with ``tied`` and ``buffers.inv_freq``."""
        out = {name: digest(parameter) for name, parameter in self._plain.named_parameters()}
        out["buffers.inv_freq"] = digest(self._plain.model.rotary_emb.inv_freq)
        out["tied"] = "true" if self._plain.lm_head.weight is self._plain.model.embed_tokens.weight else "false"
        return out

    def provenance(self) -> Mapping[str, Any]:
        import transformers

        return {
            "engine": "transformers",
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "model_class": type(self._exact).__name__,
            "device": self.config.device,
            "oracle_dtype": str(next(self._exact.parameters()).dtype).removeprefix("torch."),
            "plain_dtype": str(next(self._plain.parameters()).dtype).removeprefix("torch."),
            "plain_attention": self._plain.config._attn_implementation,
            "threads": torch.get_num_threads(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", ""),
        }

    def generate(self, prompts: Seq[Prompt], *, max_new_tokens: int, seed: int) -> tuple[Sequence, ...]:
        raise UsageError("oracle-does-not-generate", "the oracle scores given tokens; only the rollout engine samples", where="oracle")

    def run(self, arm: Arm, sequences: Seq[Sequence]) -> ArmResult:
        """Scores of the response tokens, nats, for path ``oracle`` (the oracle's dtype) and path ``plain`` (the run's)."""
        models = {"oracle": self._exact, "plain": self._plain}
        strange = [path for path in arm.paths if path not in models]
        if strange or arm.pins or arm.probe != "none" or arm.settings:
            raise UsageError(
                "oracle-cannot-run-arm",
                f"arm {arm.id!r} asks for {', '.join([*strange, *sorted(arm.pins), *arm.settings] or [f'probe {arm.probe}'])}",
                where="oracle",
                hint="the oracle scores the paths oracle and plain, and nothing else",
            )
        assert self._checkpoint is not None
        model_config = self._checkpoint.config
        check_ids(sequences, vocab_size=model_config.vocab_size, max_positions=model_config.max_positions)
        start = time.perf_counter()
        scores = {str(path): {s.id: self._score(models[path], s, watched=path == "oracle") for s in sequences} for path in arm.paths}
        return ArmResult(arm=arm, scores=scores, seconds=time.perf_counter() - start)

    def close(self) -> None:
        self._plain = self._exact = None

    @torch.no_grad()
    def _score(self, model: Any, sequence: Sequence, *, watched: bool) -> torch.Tensor:
        """float64 [R] on the CPU: log-softmax over the real vocabulary of transformed logits at each response token."""
        ids_1T = torch.tensor([sequence.token_ids], device=self.config.device)
        first = len(sequence.prompt_ids)
        parts = []
        with _OnlyDtype(next(model.parameters()).dtype, enabled=watched):
            hidden_RH = model.model(input_ids=ids_1T, use_cache=False).last_hidden_state[0, first - 1 : -1]
            for start in range(0, hidden_RH.shape[0], _HEAD_BLOCK):
                rows = slice(start, start + _HEAD_BLOCK)
                parts.append((model.lm_head(hidden_RH[rows]), ids_1T[0, first:][rows]))
        scored = [
            torch.log_softmax(chain_of(self.config).apply(logits_RV.double()), -1).gather(-1, targets_R[:, None])[:, 0].cpu()
            for logits_RV, targets_R in parts
        ]
        return torch.cat(scored) if scored else torch.empty(0, dtype=torch.float64)


def _take_out_casts(model: Any) -> None:
    """Give the norms and the rotary embedding of `model` forwards that compute in the dtype of their input."""
    replaced = 0
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = _exact_norm(module)
            replaced += 1
    model.model.rotary_emb.forward = _exact_rotary(model.model.rotary_emb)
    if not replaced:
        raise EngineError("oracle-not-exact", f"no RMSNorm was found in {type(model).__name__}", where="oracle")


def _exact_norm(module: Any) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = module.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon))
        return normed

    return forward


def _exact_rotary(module: Any) -> Any:
    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].to(x.dtype) * module.inv_freq
        both = torch.cat((angles, angles), -1)
        return both.cos() * module.attention_scaling, both.sin() * module.attention_scaling

    return forward


def _exact_attention(
    module: Any,
    q_1HTD: torch.Tensor,
    k_1HTD: torch.Tensor,
    v_1HTD: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    sink: float | None = None,
    softmax_dtype: torch.dtype | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of one whole sequence in the dtype of its inputs: [1, T, H, D]. transformers' attention interface.

    sink: logit of one more score a row, whose value is 0. softmax_dtype: of the softmax alone, as transformers' own has it.
    """
    if mask is not None or q_1HTD.shape[0] != 1 or q_1HTD.shape[2] != k_1HTD.shape[2]:
        raise EngineError("oracle-not-exact", "the oracle's attention takes one whole sequence and no mask", where="oracle")
    k_1HTD = k_1HTD.repeat_interleave(module.num_key_value_groups, 1)
    v_1HTD = v_1HTD.repeat_interleave(module.num_key_value_groups, 1)
    tokens = q_1HTD.shape[2]
    positions = torch.arange(tokens, device=q_1HTD.device)
    blocks = []
    for start in range(0, tokens, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, tokens)
        scores = q_1HTD[:, :, start:end] @ k_1HTD[:, :, :end].transpose(2, 3) * scaling
        future = positions[None, :end] > positions[start:end, None]
        if sliding_window is not None:
            future = future | (positions[None, :end] <= positions[start:end, None] - sliding_window)
        scores = scores.masked_fill(future, -torch.inf)
        if sink is not None:
            scores = torch.cat([scores, scores.new_full((*scores.shape[:-1], 1), sink)], -1)
        weights = torch.softmax(scores, -1, dtype=softmax_dtype).to(v_1HTD.dtype)
        blocks.append(weights[..., :end] @ v_1HTD[:, :, :end])
    return torch.cat(blocks, 2).transpose(1, 2).contiguous(), None


class _OnlyDtype(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Raises EngineError at the first operation that yields a floating tensor of another dtype."""

    def __init__(self, dtype: torch.dtype, *, enabled: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype
        self.enabled = enabled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.enabled:
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != self.dtype:
                    raise EngineError("oracle-not-exact", f"{func} computed in {leaf.dtype} inside the {self.dtype} oracle", where="oracle")
        return out


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
