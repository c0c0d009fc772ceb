"""A classifier of texts, trained by Transformers' Trainer."""

import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import spartito as sp

torch.manual_seed(0)


def compute_metrics(prediction):
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": right.mean()}


def tokenized(count):
    """Stands in for texts after their tokenizer: words 1 to 99, the rest is padding."""
    lengths = torch.randint(4, 13, (count, 1))
    mask = (torch.arange(12) < lengths).long()
    words = torch.randint(1, 100, (count, 12)) * mask
    labels = (words[:, 0] > words[:, 1]).long()
    columns = {"input_ids": words, "attention_mask": mask, "labels": labels}
    return Dataset.from_dict({name: column.tolist() for name, column in columns.items()})


train, test = tokenized(64), tokenized(32)
config = BertConfig(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)

optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
schedule = get_linear_schedule_with_warmup(optimizer, 0, 3 * 8)
trainer = sp.Trainer(
    model, optimizer=optimizer, scheduler=schedule, clip_norm=1.0, compute_metrics=compute_metrics
)
trainer.fit(train, batch_size=8, epochs=3)
print("loss", trainer.evaluate(test)["loss"])
