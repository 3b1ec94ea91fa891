"""Activation checkpointing, as a training case asks for it: which layers are computed again in backward, and how."""

import contextlib
import functools


def checkpoint(model, setup):
    """Lets the layers that the setup names be computed again in backward."""
    form, _, argument = setup["checkpoint"].partition(":")
    if form == "none":
        return
    import torch
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    arguments = {"use_reentrant": bool(setup.get("checkpoint_reentrant"))}
    if form == "selective":
        kept = [getattr(torch.ops.aten, name).default for name in argument.split(",")]
        arguments["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)
    owner, name = layers_of(model)
    layers = getattr(owner, name)
    numbers = [int(number) for number in spelt_out(argument) if number.isdigit()]
    if form == "segments":
        segments, rest = [], list(layers)
        for count in numbers:
            segments.append(segment(rest[:count], hasattr(model, "gradient_checkpointing_enable")))
            rest = rest[count:]
        layers = torch.nn.ModuleList(segments + rest)
        setattr(owner, name, layers)
    offload = "checkpoints" in setup.get("offload", ())
    if hasattr(model, "gradient_checkpointing_enable"):
        kept = {"offload": True} if offload else {}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments, **kept)
    else:

        def checkpointing(layer, x):
            on_cpu = torch.autograd.graph.save_on_cpu(pin_memory=True)
            with on_cpu if offload else contextlib.nullcontext():
                return torch.utils.checkpoint.checkpoint(layer, x, **arguments)

        model.checkpointing = checkpointing
    for index, layer in enumerate(layers):
        if form in ("every", "layers"):
            chosen = index % numbers[0] == 0 if form == "every" else index in numbers
        else:
            chosen = form != "segments" or hasattr(layer, "parts")
        layer.gradient_checkpointing = chosen
        for part in getattr(layer, "parts", ()):
            part.gradient_checkpointing = False


def spelt_out(list_of_numbers):
    """The parts of a list in which NxK is K, N times."""
    for part in list_of_numbers.split(","):
        times, cross, number = part.partition("x")
        yield from [number] * int(times) if cross and times.isdigit() else [part]


def mlp(linears):
    """Linear layers with ReLU, each of which may be computed again."""
    import torch

    class Layer(torch.nn.Module):
        gradient_checkpointing = False

        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return torch.nn.functional.relu(self.linear(x))

    class Mlp(torch.nn.Module):
        checkpointing = None

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer(linear) for linear in linears)

        def forward(self, x):
            for layer in self.layers:
                x = self.checkpointing(layer, x) if layer.gradient_checkpointing else layer(x)
            return x

    return Mlp()


def layers_of(model):
    """The module that holds the repeated layers, and its name for them."""
    for owner in model.modules():
        for name in ("layers", "h"):
            if hasattr(owner, name):
                return owner, name
    raise AttributeError("the model has no list of layers")


def segment(layers, of_transformers):
    """Consecutive layers as one that may be computed again."""
    import torch

    def run(self, hidden_states, *args, **kwargs):
        for part in self.parts:
            hidden_states = part(hidden_states, *args, **kwargs)
        return hidden_states

    base = torch.nn.Module
    if of_transformers:
        from transformers.modeling_layers import GradientCheckpointingLayer as base
    kind = type("Segment", (base,), {"forward": run, "gradient_checkpointing": False})
    made = kind()
    made.parts = torch.nn.ModuleList(layers)
    return made
