"""The losses of a language model over token ids that are their own labels, as the training case asks for them."""


def loss_of(setup, model):
    """What makes the loss from ids: of the model itself, in chunks, or fused with the head."""
    form, _, argument = (setup.get("loss") or "default").partition(":")
    inner = getattr(model, "module", model)
    causal = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    if form == "fp32-logits":
        causal.lm_head.register_forward_hook(lambda module, arguments, logits: logits.float())
    if form in ("default", "fp32-logits"):
        return lambda ids: model(input_ids=ids, labels=ids).loss
    if form == "chunked":
        return lambda ids: chunked(causal, ids, int(argument))
    if form == "fused-linear":
        return lambda ids: fused_linear(causal, ids)[0]
    raise ValueError(f"the loss `{form}` is not known")


def chunked(causal, ids, chunks):
    """The sequence is cut into chunks before the head, as torchtune's `TransformerDecoder.chunked_output` does."""
    import torch

    hidden = causal.base_model(input_ids=ids).last_hidden_state
    logits = [capped(causal, causal.lm_head(chunk)) for chunk in hidden.chunk(chunks, dim=1)]
    labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[..., 1:]
    return chunked_cross_entropy(logits, labels)


def capped(causal, logits):
    """The logits softly bounded, where the model bounds them."""
    import torch

    cap = getattr(causal.config, "final_logit_softcapping", None)
    if cap is not None:
        logits = logits / cap
        logits = torch.tanh(logits)
        logits = logits * cap
    return logits


def chunked_cross_entropy(logits, labels):
    """The sum of the chunks' losses over the number of labels, one chunk in fp32 at a time: `CEWithChunkedOutputLoss`."""
    count = (labels != -100).sum()
    labels = [chunk.reshape(-1) for chunk in labels.chunk(len(logits), dim=1)]
    logits = [chunk.reshape(-1, chunk.size(-1)) for chunk in logits]
    total = 0.0
    for chunk, target in zip(logits, labels):
        total += summed_cross_entropy(chunk, target)
    return total / count


def summed_cross_entropy(logits, labels):
    import torch

    return torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")


def fused_linear(causal, ids):
    """Liger-Kernel's head and loss in one, as its `lce_forward` calls them; its other kernels are left out."""
    from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss

    outputs = causal.base_model(input_ids=ids)
    hidden = outputs[0]
    kept = hidden[:, slice(0, None), :]
    loss = LigerForCausalLMLoss(
        hidden_states=kept,
        lm_head_weight=causal.lm_head.weight,
        labels=ids,
        hidden_size=causal.config.hidden_size,
        final_logit_softcapping=getattr(causal.config, "final_logit_softcapping", None),
    )
    # The output has the cache too, and outlives the call.
    return loss, outputs.past_key_values
