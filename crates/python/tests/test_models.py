"""What autograd keeps of Hugging Face models on the CPU is what the engine says, object by object.

The differences are in names alone. The engine says where an object was made; PyTorch's graph does not say it of what
has no gradient: the ids (which the engine gives no owner) and the tables of positions. What the loss makes belongs to
no module of the model.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import vramledger  # noqa: E402

BATCH, SEQ, VOCABULARY = 2, 16, 128
SMALL: dict[str, Any] = dict(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=160,
    vocab_size=VOCABULARY,
    max_position_embeddings=64,
    use_cache=False,
)
GPT2: dict[str, Any] = dict(
    n_layer=2,
    n_embd=64,
    n_head=4,
    vocab_size=VOCABULARY,
    n_positions=64,
    bos_token_id=0,
    eos_token_id=0,
    # Dropout has another kernel on the CPU, which keeps another mask.
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    use_cache=False,
)
MODELS = {
    "GPT2": (GPT2, {"transformer.wte": None, "transformer.wpe": "transformer"}),
    "Llama": (SMALL, {"model.embed_tokens": None, "model.layers.0.self_attn": "model.rotary_emb"}),
    "Qwen2": (SMALL, {"model.embed_tokens": None, "model.layers.0.self_attn": "model.rotary_emb"}),
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", MODELS)
def test_saved_tensors_are_those_of_the_engine(family: str, attention: str, tmp_path: Path) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    options, renamed = MODELS[family]
    config = getattr(transformers, f"{family}Config")(**options, attn_implementation=attention)
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config).float()
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQ))
    with sdpa_kernel(SDPBackend.MATH):
        measured = vramledger.saved_tensors(lambda: model(input_ids=ids, labels=ids), model)
    kernel: Any = {"sdpa_kernel": "math"} if attention == "sdpa" else {}
    plan = vramledger.plan(tmp_path, batch=BATCH, seq=SEQ, dtype="fp32", attention=attention, **kernel)
    planned = [o for o in plan.objects("forward") if o.saved and o.category not in ("parameter", "buffer")]

    assert measured.activation_bytes == sum(o.bytes for o in planned)
    ours: Counter[tuple[str | None, int]] = Counter((o.owner, o.bytes) for o in planned)
    theirs: Counter[tuple[str | None, int]] = Counter((row.made_in, row.bytes) for row in measured.activations)
    missing, besides = ours - theirs, theirs - ours
    assert sum(missing.values()) == sum(besides.values())
    # Each that goes by another name is of the same size.
    small = VOCABULARY * SEQ * BATCH * 4
    for (owner, size), count in besides.items():
        other = "loss" if not owner else renamed[owner]
        assert missing[other, size] == count and size <= small
        del missing[other, size]
    assert not missing
    # And nothing of a layer but the tables of positions does.
    assert all(not owner or ".layers." not in owner and ".h." not in owner or owner in renamed for owner, _ in besides)


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_flash_attention_keeps_its_random_state_on_gpus_alone(family: str, tmp_path: Path) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    config = getattr(transformers, f"{family}Config")(**SMALL, attn_implementation="sdpa")
    config.save_pretrained(tmp_path)
    model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16()
    ids = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        measured = vramledger.saved_tensors(lambda: model(input_ids=ids, labels=ids), model)
    assert sum("flash_attention" in row.operator for row in measured.rows) == 5 * SMALL["num_hidden_layers"]
    plan = vramledger.plan(tmp_path, batch=BATCH, seq=SEQ, dtype="bf16", sdpa_kernel="flash")
    planned = [o for o in plan.objects("forward") if o.saved and o.category not in ("parameter", "buffer")]
    of_gpus = [o for o in planned if o.name.rpartition(".")[2] in ("rng_state", "rng_unused")]
    assert [o.bytes for o in of_gpus] == [16, 8] * SMALL["num_hidden_layers"]
    assert Counter(row.bytes for row in measured.activations) == Counter(
        o.bytes for o in planned if o not in of_gpus
    )
