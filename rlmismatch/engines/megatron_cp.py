"""Context parallelism of the trainer: what Megatron-core has of it, and an attention of ours where it has none.

Megatron's own core attention refuses context parallelism; Transformer Engine's, on a GPU, is the only one that has it. Under the local
spec the layer spec names `ContextParallelAttention` instead: K and V of all ranks are gathered, and each rank's rows attend by our kernel.
So there the trainer's attention is the pin in every arm, the native one too, and the run says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from rlmismatch.contract import Reading, documented, not_applicable, read, unknown
from rlmismatch.engines import attention_merges
from rlmismatch.engines.attention_lse import LseFound
from rlmismatch.engines.megatron_evidence import Fields, dtype_of, fill
from rlmismatch.engines.protocol import SideConfig
from rlmismatch.errors import EnvironmentUnfitError, UsageError
from rlmismatch.kernels import attention
from rlmismatch.pins.context_parallel import PARTITIONS, ContextParallel
from rlmismatch.pins.hooks import Patch, installed

if TYPE_CHECKING:
    from rlmismatch.checkpoint import ModelConfig
    from rlmismatch.engines.megatron import MegatronEngine

_TE_SPLITS: Final = "the backend that Transformer Engine chose splits as it likes, and reports nothing"
PINNED_ONLY: Final = (
    "context parallelism without Transformer Engine: Megatron-core has no attention for it, so attention is ours (the pin) in every arm"
)


def comm_type(config: SideConfig) -> str:
    """How K and V travel between the ranks: what was asked for, or the layer spec's own way."""
    return config.cp_comm_type or ("p2p" if config.trainer_spec == "te" else "all_gather")


def check(config: SideConfig, model: ModelConfig) -> None:
    """Refuse, in one UsageError, what this context parallelism cannot be."""
    if config.cp == 1:
        return
    heads = model.num_heads // config.tp
    kv_heads = max(1, model.num_kv_heads // config.tp)
    reason, hint = "", ""
    if config.trainer_spec == "local" and comm_type(config) != "all_gather":
        reason, hint = f"{config.cp_comm_type} needs Transformer Engine's attention", "--trainer-spec te, or --cp-comm-type all_gather"
    elif config.trainer_spec == "te" and config.cp_partition != "zigzag":
        reason, hint = "Transformer Engine's attention takes zigzag chunks only", "--cp-partition zigzag"
    elif comm_type(config) == "a2a" and (heads % config.cp or kv_heads % config.cp):
        reason = f"a2a deals heads to ranks: {heads} query and {kv_heads} key/value heads a rank do not fit CP{config.cp}"
        hint = "another --cp-comm-type, or a smaller --cp or --trainer-tp"
    if reason:
        raise UsageError("context-parallel-does-not-fit", reason, where="trainer", hint=hint)


class ContextParallelAttention(torch.nn.Module):
    """Core attention of a layer spec under context parallelism, without Transformer Engine. Forward only.

    Takes and gives Megatron's layout: query [s, B = 1, Hq, D], key and value [s, 1, Hkv, D] of this rank's tokens -> [s, 1, Hq * D].
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, *_: Any, cp: ContextParallel, impl: attention.Impl, **__: Any
    ) -> None:
        super().__init__()
        self.cp = cp
        self.impl = impl
        self.softmax_scale = float(config.kv_channels**-0.5)
        self.window = None if config.window_size is None else int(config.window_size[0]) + 1
        self.attention_dropout = torch.nn.Dropout(0.0)  # there is none here; where Megatron's readers look for it

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and query.requires_grad:
            # all_gather of torch.distributed is not differentiable: the gradient would be silently wrong.
            raise EnvironmentUnfitError(
                "context-parallel-forward-only",
                "context parallelism without Transformer Engine has no backward",
                where="trainer",
                hint="use --cp 1, or --trainer-spec te on GPUs",
            )
        qkv = (query[:, 0], key[:, 0], value[:, 0])
        out_sHD = self.cp.attend(attention.paged, *qkv, scale=self.softmax_scale, window=self.window, impl=self.impl)
        return out_sHD.flatten(1)[:, None]


def rope_patches(config: SideConfig, cp: ContextParallel) -> Sequence[Patch]:
    """Megatron's own slice of the rotary table is zigzag and wants a GPU; ours is put in where one of the two does not hold."""
    if cp.size == 1 or (config.device == "cuda" and cp.partition == "zigzag"):
        return ()
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    def make(_: Any) -> Any:
        return lambda pos_emb, seq_dim, cp_group: cp.own(pos_emb, seq_dim)

    return [Patch(target=rotary_pos_embedding, name="get_pos_emb_on_this_cp_rank", make=make, pins=(), label="rope under CP")]


def partition_read(engine: MegatronEngine) -> Reading:
    """Which tokens the live ranks embed of a sequence whose ids are its positions. Collective."""
    cp = engine.cp
    source = "trial: the ids that each context-parallel rank embeds"
    length = cp.multiple * (engine.tp.size if engine.config.sp else 1)
    seen: list[torch.Tensor] = []

    def make(native: Any) -> Any:
        def forward(ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append(ids[0].clone())
            return native(ids, *args, **kwargs)

        return forward

    with installed([Patch(target=engine.gpt.embedding.word_embeddings, name="forward", make=make, pins=(), label="probe")]):
        engine.forward(list(range(length)), labels=None)
    held = [ids.tolist() for ids in cp.ranks.gathered(seen[0])]
    for partition in PARTITIONS:
        known = ContextParallel(ranks=cp.ranks, partition=partition)
        if held == [known.positions(length, rank).tolist() for rank in range(cp.size)]:
            return read(partition, source)
    return unknown(f"{source}: {held} is neither zigzag nor contiguous")


def merge_readings(engine: MegatronEngine) -> Fields:
    """The fields of attention.merge_order: how the trainer's partial attention results become one. Collective."""
    if engine.cp.size == 1:
        names = ("global_block_index", "acc_dtype", "merge_order", "cp_partition", "cp_comm_type", "engine")
        local = engine.config.trainer_spec == "local"
        splits = documented("1", "DotProductAttention: one softmax over all keys") if local else unknown(_TE_SPLITS)
        return {**fill(not_applicable("CP1: nothing is merged across ranks"), *names), "split_kv_policy": splits}
    core = engine.gpt.decoder.layers[0].self_attention.core_attention
    partition = partition_read(engine)
    if engine.config.trainer_spec == "local":
        ours = "pins/context_parallel.py, kernels/attention"
        return {
            "global_block_index": documented("absolute position", ours),
            "acc_dtype": documented("float64" if core.impl == "reference" else "float32", ours),
            "merge_order": documented("ascending global block index", ours),
            "cp_partition": partition,
            "cp_comm_type": read("all_gather", "ContextParallelAttention.forward"),
            "split_kv_policy": documented(f"splits of {attention.SPLIT} tokens", ours),
            "engine": read(type(core).__name__, "type(core_attention)"),
        }
    return _te_merge_readings(core, partition)


def _te_merge_readings(core: Any, partition: Reading) -> Fields:
    """Of Transformer Engine's attention: ``p2p`` merges one partial output a rank; the other two gather K and V, or heads, first."""
    travels = str(core.cp_comm_type)
    out: Fields = {
        "cp_partition": partition,
        "cp_comm_type": read(travels, "core_attention.cp_comm_type"),
        "split_kv_policy": unknown(_TE_SPLITS),
        "engine": read(type(core).__name__, "type(core_attention)"),
    }
    if travels != "p2p":
        nothing = not_applicable(f"{travels}: each rank makes one pass over all K and V of its heads; nothing is merged across ranks")
        return {**out, **fill(nothing, "global_block_index", "acc_dtype", "merge_order")}
    return {
        **out,
        "global_block_index": documented("context-parallel chunk", _TE_SOURCE),
        "acc_dtype": _te_merge_dtype(),
        "merge_order": documented("ring: own chunks first, then those of the ranks before", _TE_SOURCE),
    }


_TE_SOURCE: Final = "transformer_engine 2, pytorch/attention/dot_product_attention/context_parallel.py: AttnFuncWithCPAndKVP2P"


def _te_merge_dtype() -> Reading:
    """dtype in which Transformer Engine adds the partial outputs of a ring, asked of the function that starts the sum."""
    name = "flash_attn_fwd_out_correction_init"
    source = f"trial: dtype of what {name} returns for bfloat16 partial outputs"
    try:
        from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

        start = getattr(context_parallel, name)
    except (ImportError, AttributeError):
        return unknown(f"this transformer_engine has no {name}")
    out_SBHD = torch.ones(2, 1, 1, 8, dtype=torch.bfloat16, device="cuda")
    lse_BHS = torch.zeros(1, 1, 2, dtype=torch.float32, device="cuda")
    return read(dtype_of(start(out_SBHD, lse_BHS, lse_BHS, 0)), source)


def lse_readings(engine: MegatronEngine) -> Fields:
    """The fields of attention.lse, which apply where a merge of partial outputs consumes an LSE: in Transformer Engine's ring."""
    names = ("lse_export", "lse_domain", "lse_base", "lse_shape", "masked_row")
    if engine.cp.size == 1:
        return fill(not_applicable("CP1: no merge consumes an LSE"), *names)
    travels = comm_type(engine.config)
    if travels != "p2p":
        return attention_merges.fields(
            None if engine.config.trainer_spec == "te" else _merged(engine),
            f"{travels}: K and V are gathered, no merge consumes an LSE",
            "trial: the merge of the ranks' partial outputs",
        )
    return {
        "lse_export": documented(True, _TE_SOURCE),
        "lse_domain": documented("attention scores", _TE_SOURCE),
        "lse_base": documented("e", _TE_SOURCE),
        "lse_shape": documented("[head, token]", _TE_SOURCE),
        "masked_row": not_applicable("a step of the ring holds no row that sees nothing"),
    }


def _merged(engine: MegatronEngine) -> LseFound | None:
    """What merges inside the first layer's attention of ours take, where it has any. Collective."""
    cp, model = engine.cp, engine.model
    core, weight = engine.gpt.decoder.layers[0].self_attention.core_attention, next(engine.gpt.parameters())
    heads = (model.num_heads // engine.tp.size, max(1, model.num_kv_heads // engine.tp.size))
    tokens = attention_merges.TOKENS + -attention_merges.TOKENS % cp.multiple
    qkv = attention_merges.trial_operands(tokens, *heads, model.head_dim, weight.dtype, weight.device)
    with torch.no_grad(), attention_merges.consumed() as merges:
        core(*(cp.own(x)[:, None].contiguous() for x in qkv), None)
    return attention_merges.diagnose_merges(merges, *qkv[:2], model.head_dim**-0.5)


def precision_readings(engine: MegatronEngine) -> Fields:
    """The fields of attention.precision where attention is ours."""
    core = engine.gpt.decoder.layers[0].self_attention.core_attention
    ours, inside = f"kernels/attention/{core.impl}.py", "float64" if core.impl == "reference" else "float32"
    return {
        "accum_dtype": documented("float32", f"{ours}: {inside} inside, which is at least float32"),
        "downcast_at": documented("final_write", ours),
        "kv_dtype": read(dtype_of(engine.gpt.decoder.layers[0].self_attention.linear_qkv.weight), "linear_qkv.weight.dtype"),
        "backend_policy": documented(f"scores, softmax and probabilities {inside}", ours),
    }
