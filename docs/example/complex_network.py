"""Train a complex-valued network privately: `python complex_network.py`."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import zdp_bench
from zdp_bench.nn import Cardioid, ComplexAvgPool2d, ComplexConv2d, ComplexGroupNorm

CLASSES = 4


class Phases(Dataset):
    """Noise whose phase tells the class; any map-style dataset of complex tensors will do."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        target = index % CLASSES
        noise = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(index))
        phase = 2 * math.pi * target / CLASSES + 0.3 * noise
        return torch.polar(torch.ones_like(phase), phase), target


class Network(nn.Module):
    """Complex up to the last layer, whose real parts are the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            ComplexConv2d(1, 8, 3),
            ComplexGroupNorm(2, 8),
            Cardioid(),
            ComplexAvgPool2d(2),
            nn.Flatten(),
        )
        self.scores = nn.Linear(8 * 3 * 3, CLASSES, dtype=torch.complex64)

    def forward(self, z: Tensor) -> Tensor:
        return self.scores(self.features(z)).real


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per example, never a mean."""
    return F.cross_entropy(outputs, targets, reduction="none")


def train(folder: Path) -> tuple[float, float]:
    """Return ε and the accuracy on the training examples, which the script made up itself."""
    dataset, model = Phases(), Network()
    with zdp_bench.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        dataset,
        loss=loss,
        epochs=5,
        batch_size=80,
        target_epsilon=3.0,
        max_grad_norm=1.0,
        delta=1e-3,
        algorithm="zeta_dp_sgd",
        ledger=folder / "ledger.jsonl",
    ) as private:
        private.resume()  # if it was saved before
        for batch in private.batches():
            private.step(batch)
        private.save()
    inputs = torch.stack([dataset[i][0] for i in range(len(dataset))])
    with torch.no_grad():
        right = model(inputs).argmax(dim=1) == torch.arange(len(dataset)) % CLASSES
    return private.epsilon, float(right.float().mean())


if __name__ == "__main__":
    epsilon, accuracy = train(Path("complex-run"))
    print(f"ε = {epsilon:.2f}, accuracy {accuracy:.0%}")
