"""A step on fake tensors has the objects that the engine says, at the end of every phase."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import vramledger  # noqa: E402
from test_demonstrations import make_mlp  # noqa: E402

PHASES = [("load", 0), *((phase, step) for step in (1, 2) for phase in ("forward", "backward", "update"))]


def objects(ledger: vramledger.Ledger, phase: str, step: int) -> Counter[Any]:
    """What is on the device, each by what it is."""
    alive = ledger.objects(phase, step=step)
    return Counter((o.category, o.bytes, o.saved) for o in alive if o.device != "host")


def test_an_mlp_is_that_of_the_engine() -> None:
    captured = vramledger.capture(make_mlp(4, 512), torch.randn(32, 512), torch.optim.AdamW)
    plan = vramledger.plan("mlp:4x512", batch=32, loss="sum", optimizer_impl="foreach", steps=2)
    for phase, step in PHASES:
        assert objects(captured, phase, step) == objects(plan, phase, step), (phase, step)
    # The counters of the optimizer are on the host.
    counters = [o for o in captured.objects("update") if o.device == "host"]
    assert [o.bytes for o in counters] == [4] * 4
    assert captured.fits and captured.to_dict()["parameters"]["bytes"] == 4 * 512 * 512 * 4


def test_names_and_owners_are_those_of_the_modules() -> None:
    captured = vramledger.capture(make_mlp(2, 8), torch.randn(4, 8))
    kept = [(o.name, o.owner, o.shape) for o in captured.objects() if o.saved and o.category == "activation"]
    assert kept == [("*.relu", "1", (4, 8)), ("*.relu", "3", (4, 8))]


def test_a_model_larger_than_memory_is_made_fake() -> None:
    def make() -> Any:
        return torch.nn.Sequential(*(torch.nn.Linear(1 << 18, 1 << 18, bias=False) for _ in range(2)))

    captured = vramledger.capture(make, torch.empty(1, 1 << 18), torch.optim.SGD, steps=1)
    assert captured.to_dict()["parameters"]["bytes"] == 2 << 38
    assert captured.fits is False
    assert captured.to_dict()["oom"]["requested_bytes"] == 1 << 38


def test_micro_batches_dropout_and_other_optimizers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    captured = vramledger.capture(model, [torch.randn(8, 16)], optimizer, accumulate=2)
    assert {row["micro_batch"] for row in captured.phases if row["phase"] == "forward"} == {1, 2}
    assert [o.bytes for o in captured.objects() if o.dtype == "bool"] == [8 * 16]
    state = [o.name for o in captured.objects("update") if o.category == "optimizer_state"]
    assert "*.weight.momentum_buffer" in state
    # The model itself is as it was.
    assert model[0].weight.grad is None and type(model[0].weight) is torch.nn.Parameter


def test_layers_that_run_again_keep_less() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            blocks = (torch.nn.Sequential(make_mlp(2, 64), torch.nn.Dropout(0.1)) for _ in range(3))
            self.blocks = torch.nn.ModuleList(blocks)

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    captured = vramledger.capture(Checkpointed(), torch.randn(8, 64))
    # What autograd keeps of a checkpointed block is what it is called with.
    kept = [o for o in captured.objects() if o.category in ("activation", "input") and o.bytes == 8 * 64 * 4]
    assert len(kept) == 3


def test_a_step_that_needs_values_is_an_error() -> None:
    class Looks(torch.nn.Linear):  # type: ignore[name-defined,misc]
        def forward(self, x: Any) -> Any:
            return super().forward(x) if x.sum().item() > 0 else x

    with pytest.raises(vramledger.MeasureError, match="needs the value of a tensor"):
        vramledger.capture(Looks(4, 4), torch.ones(1, 4))


@pytest.mark.parametrize("family", ["GPT2", "Llama", "Qwen2"])
def test_models_of_hugging_face_are_those_of_the_engine(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from test_models import MODELS

    config = getattr(transformers, f"{family}Config")(**MODELS[family][0], attn_implementation="eager")
    config.save_pretrained(tmp_path)
    model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    captured = vramledger.capture(model, {"input_ids": ids, "labels": ids}, torch.optim.AdamW)
    options: Any = {"attention": "eager", "dtype": "fp32", "optimizer_impl": "foreach"}
    plan = vramledger.plan(tmp_path, batch=2, seq=16, steps=2, **options)
    for phase, step in PHASES:
        assert objects(captured, phase, step) == objects(plan, phase, step), (phase, step)


WIDTHS: dict[str, Any] = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
NO_DROPOUT: dict[str, Any] = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@pytest.mark.parametrize(
    ("family", "task", "options"),
    [
        ("Bert", "ForMaskedLM", {**WIDTHS, **NO_DROPOUT, "vocab_size": 100}),
        ("ViT", "ForImageClassification", {**WIDTHS, **NO_DROPOUT, "image_size": 32, "patch_size": 8}),
        ("ResNet", "ForImageClassification", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}),
        ("Mixtral", "ForCausalLM", {**WIDTHS, "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 100}),
        ("Mamba", "ForCausalLM", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "state_size": 8}),
    ],
)
def test_models_that_no_planner_knows_keep_what_a_real_pass_keeps(family: str, task: str, options: Any) -> None:
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, family + task)(getattr(transformers, f"{family}Config")(**options))
    if "Image" in task:
        batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.int64)}
    else:
        ids = torch.randint(0, 100, (2, 16))
        batch = {"input_ids": ids, "labels": ids}
    captured = vramledger.capture(model, batch, torch.optim.AdamW, steps=1)
    kept = Counter(o.bytes for o in captured.objects() if o.saved)
    measured = vramledger.saved_tensors(lambda: model(**batch).loss, model)
    assert kept == Counter(row.bytes for row in measured.activations)
    assert captured.peak("requested") > 3 * captured.to_dict()["parameters"]["bytes"]
