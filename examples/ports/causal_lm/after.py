"""A language model is tuned on replies: prompts and padding have the label -100."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

import spartito as sp

torch.manual_seed(0)
PROMPT, LENGTH = 4, 12


class Replies(torch.utils.data.Dataset):
    """Stands in for dialogues after their tokenizer."""

    def __init__(self, count):
        self.words = torch.randint(1, 50, (count, LENGTH))
        self.lengths = torch.randint(PROMPT + 2, LENGTH + 1, (count,))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        mask = (torch.arange(LENGTH) < self.lengths[index]).long()
        labels = self.words[index].masked_fill(mask == 0, -100)
        labels[:PROMPT] = -100
        return {"input_ids": self.words[index] * mask, "attention_mask": mask, "labels": labels}


train = Replies(48)
config = GPT2Config(
    vocab_size=50,
    n_positions=LENGTH,
    n_embd=32,
    n_layer=2,
    n_head=2,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
)
model = GPT2LMHeadModel(config)

optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
schedule = get_linear_schedule_with_warmup(optimizer, 0, 9)
trainer = sp.Trainer(
    model, optimizer=optimizer, scheduler=schedule, clip_norm=1.0, gradient_accumulation_steps=2
)
trainer.fit(train, max_steps=9, batch_size=8)
trainer.save_weights("tuned.safetensors")

model.eval()
rows = torch.utils.data.default_collate(list(train))
with torch.no_grad():
    print("loss", model(**rows).loss.item())
