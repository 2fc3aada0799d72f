"""Public architectures with random weights, small enough to train a step of, and their inputs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import pack_padded_sequence

from zdp_bench.nn import replace_batchnorm
from zdp_bench.registry import lookup

CLASSES, EXAMPLES = 4, 4
Build = Callable[[], tuple[nn.Module, Any]]


def without_batchnorm(model: nn.Module) -> nn.Module:
    """The model with GroupNorm in the place of BatchNorm, if it has any."""
    norms = any(isinstance(module, _BatchNorm) for module in model.modules())
    return replace_batchnorm(model, "group") if norms else model


class Picked(nn.Module):
    """The tensor that counts of a model that returns an object."""

    def __init__(self, model: nn.Module, name: str = "logits") -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = getattr(self.model(x), self.name)
        return output


def images(size: int, channels: int = 3) -> Tensor:
    return torch.randn(EXAMPLES, channels, size, size)


def words(length: int = 12, many: int = 50) -> Tensor:
    return torch.randint(1, many, (EXAMPLES, length))


def of_timm(name: str, size: int = 32, **options: Any) -> Build:
    def build() -> tuple[nn.Module, Any]:
        import timm

        model = timm.create_model(name, num_classes=CLASSES, **options)
        return without_batchnorm(model), images(size)

    return build


def of_torchvision(name: str, size: int = 64) -> Build:
    def build() -> tuple[nn.Module, Any]:
        import torchvision

        model = getattr(torchvision.models, name)(num_classes=CLASSES)
        return without_batchnorm(model), images(size)

    return build


def of_transformers(kind: str, head: str, pick: str = "logits", **options: Any) -> Build:
    def build() -> tuple[nn.Module, Any]:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**options, num_labels=CLASSES)
        model = getattr(transformers, f"{kind}{head}")(config)
        return Picked(model, pick), words() if "vocab_size" in options else images(32)

    return build


def of_monai(name: str, size: int = 16, **options: Any) -> Build:
    def build() -> tuple[nn.Module, Any]:
        from monai.networks import nets

        model = getattr(nets, name)(**options)
        dims = options.get("spatial_dims", 3)
        return without_batchnorm(model), torch.randn(EXAMPLES, 1, *[size] * dims)

    return build


TEXT = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDE = {**TEXT, "intermediate_size": 32, "max_position_embeddings": 32}
CLASSIFIER = "ForSequenceClassification"


def adapted(kind: str) -> Build:
    def build() -> tuple[nn.Module, Any]:
        import peft

        logits, inputs = of_transformers("Bert", CLASSIFIER, **WIDE)()
        kinds: dict[str, Any] = {
            "lora": peft.LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.0),
            "ia3": peft.IA3Config(target_modules=["query", "dense"], feedforward_modules=["dense"]),
        }
        model = peft.get_peft_model(logits.model, kinds[kind])  # type: ignore[arg-type]
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        return Picked(model), inputs

    return build


class Text(nn.Module):
    """Words, a middle part, and the mean of its positions."""

    def __init__(self, middle: nn.Module, masks: bool = False) -> None:
        super().__init__()
        self.words, self.middle, self.head = nn.Embedding(50, 16), middle, nn.Linear(16, CLASSES)
        self.masks = masks

    def forward(self, x: Tensor) -> Tensor:
        padded = x < 10
        h = self.words(x)
        h = self.middle(h, src_key_padding_mask=padded) if self.masks else self.middle(h)
        h = h[0] if isinstance(h, tuple) else h
        kept = (~padded).unsqueeze(-1)
        return self.head((h * kept).sum(1) / kept.sum(1).clamp(min=1))


class Packed(Text):
    def forward(self, x: Tensor) -> Tensor:
        lengths = (x >= 10).sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(
            self.words(x), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.middle(packed)[1][0][-1])


def text(middle: Callable[[], nn.Module], kind: type[Text] = Text, **options: Any) -> Build:
    return lambda: (kind(middle(), **options), words())


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def ours(name: str, shape: tuple[int, ...], **options: Any) -> Build:
    def build() -> tuple[nn.Module, Any]:
        dtype = torch.complex64 if name.startswith("complex") else torch.float32
        return lookup("model", name)(shape, CLASSES, **options), torch.randn(
            EXAMPLES, *shape, dtype=dtype
        )

    return build


UNET: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
ARCHITECTURES: dict[str, Build] = {
    "timm ViT": of_timm("vit_tiny_patch16_224", img_size=32, patch_size=8),
    "timm DeiT": of_timm("deit_tiny_patch16_224", img_size=32, patch_size=8),
    "timm Swin": of_timm("swin_tiny_patch4_window7_224", 56, img_size=56, depths=(1, 1, 1, 1)),
    "timm MLP-Mixer": of_timm("mixer_s32_224", 64, img_size=64),
    "timm ConvNeXt": of_timm("convnext_atto"),
    "timm ConvMixer": of_timm("convmixer_768_32", 56),
    "timm ResNet-50": of_timm("resnet50_gn", 64),
    "timm NF-ResNet": of_timm("nf_resnet26", 64),
    "timm EfficientNet": of_timm("tf_efficientnet_lite0", 64),
    "timm MobileNetV3": of_timm("mobilenetv3_small_050", 64),
    "timm RegNet": of_timm("regnetx_002", 64),
    "timm DenseNet": of_timm("densenet121", 64),
    "timm PoolFormer": of_timm("poolformer_s12", 64),
    "torchvision ResNet-18": of_torchvision("resnet18"),
    "torchvision VGG-11": of_torchvision("vgg11", 32),
    "torchvision SqueezeNet": of_torchvision("squeezenet1_1"),
    "torchvision ShuffleNet": of_torchvision("shufflenet_v2_x0_5"),
    "torchvision MobileNetV2": of_torchvision("mobilenet_v2"),
    "transformers BERT": of_transformers("Bert", CLASSIFIER, **WIDE),
    "transformers RoBERTa": of_transformers("Roberta", CLASSIFIER, **WIDE, pad_token_id=1),
    "transformers DistilBERT": of_transformers(
        "DistilBert", CLASSIFIER, vocab_size=50, dim=16, n_layers=2, n_heads=2, hidden_dim=32
    ),
    "transformers ELECTRA": of_transformers("Electra", CLASSIFIER, **WIDE, embedding_size=16),
    "transformers ALBERT": of_transformers("Albert", CLASSIFIER, **WIDE, embedding_size=16),
    "transformers GPT-2": of_transformers(
        "GPT2", "LMHeadModel", vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32
    ),
    "transformers Llama": of_transformers("Llama", "ForCausalLM", **WIDE),
    "transformers ViT": of_transformers(
        "ViT",
        "ForImageClassification",
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
    ),
    "peft LoRA on BERT": adapted("lora"),
    "peft IA3 on BERT": adapted("ia3"),
    "MONAI U-Net 2-D": of_monai("UNet", 32, **UNET, channels=(4, 8, 8), strides=(2, 2)),
    "MONAI U-Net 3-D": of_monai(
        "UNet", spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,)
    ),
    "MONAI SegResNet": of_monai("SegResNet", 32, **UNET, init_filters=8),
    "MONAI DenseNet": of_monai("DenseNet121", 32, **UNET | {"out_channels": CLASSES}),
    "MONAI BasicUNet": of_monai("BasicUNet", 32, **UNET, features=(4, 4, 8, 8, 8, 4)),
    "nn.TransformerEncoder": text(encoder),
    "nn.TransformerEncoder, padding mask": text(encoder, masks=True),
    "nn.LSTM": text(lambda: nn.LSTM(16, 16, batch_first=True)),
    "nn.GRU, both ways": text(lambda: nn.GRU(16, 8, bidirectional=True, batch_first=True)),
    "nn.LSTM, packed": text(lambda: nn.LSTM(16, 16, batch_first=True), Packed),
    "our complex CNN": ours("complex_cnn", (1, 16, 16), channels=[2, 4]),
    "our real CNN": ours("real_cnn", (1, 16, 16), channels=[2, 4]),
}


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of an example, or of the first place of a map or sequence."""
    rows = outputs.flatten(1)[:, :CLASSES]
    return F.cross_entropy(rows.abs() if rows.is_complex() else rows, targets, reduction="none")
