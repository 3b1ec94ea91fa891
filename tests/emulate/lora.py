"""Low-rank adapters on a frozen Qwen2 in bfloat16, with gradient checkpointing."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM, get_cosine_schedule_with_warmup

config = Qwen2Config(
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=8000,
    max_position_embeddings=1024,
)
model = Qwen2ForCausalLM(config).to(torch.bfloat16)
adapters = LoraConfig(
    r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"
)
model = get_peft_model(model, adapters).to("cuda")
model.print_trainable_parameters()
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.config.use_cache = False
model.train()

trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=2e-4)
scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 6)

for step in range(6):
    ids = torch.randint(0, config.vocab_size, (4, 256), device="cuda")
    mask = torch.ones_like(ids)
    mask[:, -32:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}, lr {scheduler.get_last_lr()[0]:.2e}")
