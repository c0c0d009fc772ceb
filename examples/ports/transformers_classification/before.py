"""A classifier of texts, trained by Transformers' Trainer."""

import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

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

args = TrainingArguments("out", num_train_epochs=3, learning_rate=1e-3)
args.train_sampling_strategy = "sequential"
trainer = Trainer(
    model, args, train_dataset=train, eval_dataset=test, compute_metrics=compute_metrics
)
trainer.train()
print("loss", trainer.evaluate()["eval_loss"])
