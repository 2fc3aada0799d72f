"""A GAN: the discriminator is private, and the generator learns from that alone."""

import torch
import torch.nn.functional as F

import zdp_bench


def train(judge, generator, films) -> float:
    """Train both for an epoch, or go on from what was saved; return the tight ε."""
    its_optimizer = torch.optim.Adam(generator.parameters())

    def judged_as_made(judge):
        made = generator(torch.randn(64, 2)).detach()
        return F.softplus(judge(made)).mean()

    with zdp_bench.make_private(
        judge,
        torch.optim.Adam(judge.parameters()),
        films,
        loss=lambda outputs, _: F.softplus(-outputs[:, 0]),
        regulariser=judged_as_made,
        epochs=1,
        batch_size=64,
        target_epsilon=8.0,
    ) as private:
        if private.resume():
            of_generator, of_optimizer = torch.load("generator.pt")
            generator.load_state_dict(of_generator)
            its_optimizer.load_state_dict(of_optimizer)
        for batch in private.batches():
            private.step(batch)
            F.softplus(-judge(generator(torch.randn(64, 2)))).mean().backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
        torch.save((generator.state_dict(), its_optimizer.state_dict()), "generator.pt")
        private.save()
    return private.epsilon
