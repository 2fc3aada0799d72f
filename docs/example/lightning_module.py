"""Private training in Lightning: manual optimization, with `private.step` for a training step."""

import math
from itertools import islice

import lightning
import torch
import torch.nn.functional as F

import zdp_bench


class PrivateModule(lightning.LightningModule):
    automatic_optimization = False

    def __init__(self, network, dataset, **given):
        super().__init__()
        self.network, self.dataset, self.given = network, dataset, given

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.network.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]

    def on_load_checkpoint(self, checkpoint):  # its steps would be missing in ε
        raise zdp_bench.UserError("private.resume goes on by the ledger: leave ckpt_path out.")

    def on_fit_start(self):  # the network is on its device now
        self.private = zdp_bench.make_private(
            self.network,
            self.optimizers(),
            self.dataset,
            loss=lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"),
            epochs=self.trainer.max_epochs,
            **self.given,
        )
        self.private.resume(self.lr_schedulers())
        self.batches = self.private.batches()

    def train_dataloader(self):
        return range(math.ceil(self.private.steps / self.trainer.max_epochs))

    def training_step(self, number):
        for batch in islice(self.batches, 1):
            self.private.step(batch)

    def on_train_epoch_end(self):
        self.lr_schedulers().step()
        self.private.save(self.lr_schedulers())
        self.log("epsilon", self.private.epsilon)

    def on_train_end(self):
        next(self.batches, None)  # the last check of the model
        self.private.close()  # so that another `fit` can continue
