"""Hugging Face's Trainer with a small GPT-2 and random text."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

SEQUENCE = 256


class RandomText(Dataset):
    def __init__(self, length, vocabulary):
        self.ids = torch.randint(0, vocabulary, (length, SEQUENCE))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


set_seed(0)
config = GPT2Config(n_layer=4, n_head=4, n_embd=256, vocab_size=5000, n_positions=SEQUENCE)
model = GPT2LMHeadModel(config)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=5e-4,
        warmup_steps=2,
        max_steps=6,
        bf16=True,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        report_to="none",
        dataloader_num_workers=2,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=RandomText(256, config.vocab_size),
        eval_dataset=RandomText(32, config.vocab_size),
    )
    result = trainer.train()
print(result.metrics)
