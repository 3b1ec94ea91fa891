"""Frozen models with adapters, as a training case asks for them: LoRA by peft, 4-bit weights by bitsandbytes."""


def adapted(model, lora, dtype_of):
    """The model with an adapter beside each target, made on the same device `meta`."""
    import peft
    import torch

    with torch.device("meta"):
        model = peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=lora["r"],
                lora_alpha=lora["alpha"],
                lora_dropout=lora["dropout"],
                target_modules=lora["target_modules"],
                task_type="CAUSAL_LM",
            ),
        )
    if lora.get("dtype"):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype_of(lora["dtype"]))
    return model


def quantize(model, setup, dtype):
    """Gives the linear layers but the head 4-bit weights, as transformers does with a `BitsAndBytesConfig`."""
    import bitsandbytes
    import peft
    import transformers
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=setup["quantize"] == "nf4-double",
        bnb_4bit_compute_dtype=dtype,
    )
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), config)
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit) and module.bias is not None:
            module.bias.data = module.bias.data.to(dtype)
    model.is_loaded_in_4bit = True
    if setup.get("prepare_kbit"):
        peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def packed(module, parameter):
    """The 4-bit form of a weight, which is on the device as it is before."""
    import bitsandbytes
    import torch
    from transformers.pytorch_utils import Conv1D

    shape, transposed = parameter.shape, issubclass(module.source_cls, Conv1D)
    weight = torch.empty(shape[::-1] if transposed else shape, dtype=module.compute_dtype, device="cuda")
    if transposed:
        weight = weight.T
    return bitsandbytes.nn.Params4bit(weight, requires_grad=False, **parameter.__dict__).to("cuda")


def scales(parameter):
    """What a 4-bit weight needs to be read, besides itself."""
    state = getattr(parameter, "quant_state", None)
    while state is not None:
        yield from (tensor for tensor in (state.absmax, state.code, state.offset) if tensor is not None)
        state = state.state2
