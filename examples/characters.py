"""A small character transformer on text of unequal length, on workers of unequal shares.

    python examples/characters.py
    torchrun --nproc-per-node 3 examples/characters.py --shares 20,8,4

Both are the same training: the losses that they print agree within rounding. The text is what
`help("topics")` shows, the reference that comes with Python.
"""

import argparse
from itertools import islice
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader

from poise.torch import Balancer, Fixed

WIDTH, HEADS, LAYERS = 64, 4, 2
LONGEST = 96  # characters of a paragraph that are read
GLOBAL_BATCH = 32  # paragraphs per step, over all workers
PAD = -100  # targets that cross_entropy ignores

text = "\n\n".join(topics.values())
paragraphs: Any = list(dict.fromkeys(part.strip() for part in text.split("\n\n")))
characters = {character: number for number, character in enumerate(sorted(set(text)))}


def padded(texts: list[str]) -> tuple[Tensor, Tensor]:
    """Pad to the longest text of this local batch; another worker's may be longer."""
    codes = [[characters[c] for c in text[: LONGEST + 1]] for text in texts]
    longest = max(map(len, codes)) - 1
    inputs = torch.zeros(len(codes), longest, dtype=torch.long)
    targets = torch.full((len(codes), longest), PAD)
    for row, code in enumerate(codes):
        inputs[row, : len(code) - 1] = torch.tensor(code[:-1])
        targets[row, : len(code) - 1] = torch.tensor(code[1:])
    return inputs, targets


def tokens(batch: tuple[Tensor, Tensor]) -> int:
    """What the mean loss of a batch is divided by: the targets that are not padding."""
    return int((batch[1] != PAD).sum())


class Block(nn.Module):
    """Attention and a small network, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        """Let each character see those before it."""
        batch, length, _ = x.shape
        heads = self.attend(self.norm_1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        # Padding comes last, so the causal mask hides it from every character that counts.
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.narrow(gelu(self.widen(self.norm_2(x))))


class Characters(nn.Module):
    """Guesses the next character. It has no dropout, whose masks would depend on the split."""

    def __init__(self) -> None:
        super().__init__()
        self.character = nn.Embedding(len(characters), WIDTH)
        self.place = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(characters)))

    def forward(self, inputs: Tensor) -> Any:
        """Return logits, with places last."""
        places = self.place(torch.arange(inputs.shape[1], device=inputs.device))
        return self.head(self.blocks(self.character(inputs) + places)).transpose(1, 2)


def evaluate(balancer: Balancer, model: nn.Module, texts: Any) -> float:
    """Return the mean loss over all characters of some texts; each worker reads its share."""
    total = count = 0.0
    with torch.no_grad():
        for inputs, targets in balancer.evaluation(DataLoader(texts, 64, collate_fn=padded)):
            total += float(cross_entropy(model(inputs), targets, reduction="sum"))
            count += tokens((inputs, targets))
    return balancer.mean(total / max(count, 1), count)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and print on worker 0; return the loss of each step, and at last of new text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of each epoch; without it, all")
    parser.add_argument("--shares", help=f"of each worker, {GLOBAL_BATCH} in all, as 20,8,4")
    options = parser.parse_args(arguments)
    policy = Fixed([int(n) for n in options.shares.split(",")]) if options.shares else "even"
    torch.manual_seed(0)
    model = Characters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(paragraphs[256:], GLOBAL_BATCH, shuffle=True, collate_fn=padded)
    losses: list[float] = []
    with Balancer(GLOBAL_BATCH, policy=policy, count=tokens) as balancer:
        shared, optimizer, loader = balancer.prepare(model, optimizer, loader)
        for epoch in balancer.epochs(options.epochs):
            for inputs, targets in islice(loader, options.steps):
                loss = cross_entropy(shared(inputs), targets)
                loss.backward()
                nn.utils.clip_grad_norm_(shared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(balancer.mean(loss.item(), tokens((inputs, targets))))
                if balancer.worker == 0 and len(losses) % 20 == 1:
                    print(f"epoch {epoch}, step {len(losses):3}: loss {losses[-1]:.4f}", flush=True)
        losses.append(evaluate(balancer, shared, paragraphs[:256]))
        if balancer.worker == 0:
            print(f"loss of text that it has not seen: {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
