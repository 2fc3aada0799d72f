"""Every operation of the table that is not by number or over dimensions: a call that keeps examples
apart gives what each alone does, and the call that mixes is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.gradients.program.apart import (
    Function,
    X,
    program_of,
    require_alone,
    require_apart,
)
from zdp_bench.gradients.program.table import BY_NUMBER, OVER_DIMS, RULES

WORDS = torch.arange(20).view(5, 4) % 7

# --------------------------------------------------------------- what is apart, and what mixes

W = torch.linspace(-1, 1, 24)
APART: dict[str, tuple[Function, Tensor]] = {}
MIXED: dict[str, tuple[Function, Tensor]] = {}


def pair(name: str, apart: Function, mixed: Function, x: Tensor = X) -> None:
    APART[name] = (lambda _, x: apart(x), x)
    MIXED[name] = (lambda _, x: mixed(x), x)


def along(name: str, operation: Function) -> None:
    pair(name, lambda x: operation(x, 1), lambda x: operation(x, 0))


along("argsort", lambda x, dim: x.argsort(dim).float())
along("cummax", lambda x, dim: x.cummax(dim)[0])
along("cummin", lambda x, dim: x.cummin(dim)[0])
along("cumprod", lambda x, dim: x.cumprod(dim))
along("cumsum", lambda x, dim: x.cumsum(dim))
along("logcumsumexp", lambda x, dim: x.logcumsumexp(dim))
along("diff", lambda x, dim: x.diff(dim=dim))
along("flip", lambda x, dim: x.flip(dim))
along("log_softmax", lambda x, dim: x.log_softmax(dim))
along("softmax", lambda x, dim: x.softmax(dim))
along("roll", lambda x, dim: x.roll(1, dim))
along("sort", lambda x, dim: x.sort(dim)[0])
along("topk", lambda x, dim: x.topk(2, dim)[0] if dim else x + x.topk(2, 0)[0].sum())
along("glu", lambda x, dim: F.glu(x, dim) if dim else x + F.glu(torch.cat([x, x]), 0))
TORCH: dict[str, Any] = vars(torch)
FFT: dict[str, Any] = vars(torch.fft)
for _name in ("fft", "ifft", "rfft"):
    along(f"fft_{_name}", lambda x, dim, f=FFT[_name]: f(x, dim=dim).abs())
along("fft_irfft", lambda x, dim: torch.fft.irfft(x, n=x.shape[dim] if dim else 4, dim=dim))
for _name in ("fft2", "ifft2", "rfft2"):
    along(
        f"fft_{_name}",
        lambda x, dim, f=FFT[_name]: f(x, dim=(dim, 2)).abs(),
    )
along("fft_irfft2", lambda x, dim: torch.fft.irfft2(x, s=(4, 4), dim=(dim, 2)))
for _name in ("fftn", "ifftn", "rfftn"):
    pair(
        f"fft_{_name}",
        lambda x, f=FFT[_name]: f(x, dim=(1, 2)).abs(),
        lambda x, f=FFT[_name]: f(x).abs(),
    )
pair(
    "fft_irfftn",
    lambda x: torch.fft.irfftn(x, s=(4, 4), dim=(1, 2)),
    lambda x: torch.fft.irfftn(x, s=(2, 4, 4)),
)
for _name in ("fftshift", "ifftshift"):
    pair(
        f"fft_{_name}",
        lambda x, f=FFT[_name]: f(x, dim=1),
        lambda x, f=FFT[_name]: f(x),
    )
# views
pair("select", lambda x: x.select(1, 2), lambda x: x + x.select(0, 0))
pair("slice", lambda x: x[:, 1:3], lambda x: x + x[:1])
pair("narrow", lambda x: x.narrow(1, 1, 2), lambda x: x + x.narrow(0, 0, 1))
pair("chunk", lambda x: x.chunk(2, 1)[1], lambda x: x + x.chunk(2, 0)[0].sum())
pair("split", lambda x: x.split(2, 1)[0], lambda x: x + x.split(2, 0)[0].sum())
pair(
    "split_with_sizes",
    lambda x: x.split_with_sizes([1, 3], 1)[1],
    lambda x: x + x.split_with_sizes([1, len(x) - 1], 0)[0],
)
pair("unbind", lambda x: x.unbind(1)[1], lambda x: x + x.transpose(0, 1).unbind(1)[0])
pair("unfold", lambda x: x.unfold(1, 2, 1), lambda x: x.unfold(0, 2, 1).sum(-1))
pair("diagonal", lambda x: x.diagonal(0, 1, 2), lambda x: x + x.diagonal(0, 0, 1).sum())
pair("squeeze", lambda x: x[:, :, :1].squeeze(2), lambda x: x.squeeze(0))
pair("unsqueeze", lambda x: x.unsqueeze(1), lambda x: x.unsqueeze(0))
pair("transpose", lambda x: x.transpose(1, 2), lambda x: x.transpose(0, 1))
pair("swapaxes", lambda x: x.swapaxes(1, 2), lambda x: x.swapaxes(0, 1))
pair("swapdims", lambda x: x.swapdims(1, 2), lambda x: x.swapdims(0, 1))
pair("permute", lambda x: x.permute(0, 2, 1), lambda x: x.permute(1, 0, 2))
pair("movedim", lambda x: x.movedim(1, 2), lambda x: x.movedim(0, 1))
pair("moveaxis", lambda x: x.moveaxis(1, 2), lambda x: x.moveaxis(0, 1))
pair("mT", lambda x: x.mT, lambda x: x[:, 0].mT)
pair("mH", lambda x: x.mH, lambda x: x[:, 0].mH)
pair("adjoint", lambda x: x.adjoint(), lambda x: x[:, 0].adjoint())
pair("matrix_H", lambda x: x[:, 0].H.H, lambda x: x[:, 0].H)
pair("numpy_T", lambda x: x[:, 0].T.T, lambda x: x[:, 0].T)
pair("t", lambda x: x[:, 0].t().t(), lambda x: x[:, 0].t())
# shapes
pair("view", lambda x: x.view(-1, 24), lambda x: x.view(6, -1, 4).transpose(0, 1))
pair("reshape", lambda x: x.reshape(-1, 6).reshape(-1, 24), lambda x: x.mT[:, 0].t().reshape(-1, 4))
pair("flatten", lambda x: x.flatten(1), lambda x: x.flatten(0, 1))
pair("unflatten", lambda x: x.unflatten(2, (2, 3)), lambda x: x.flatten(0, 1).unflatten(0, (4, -1)))
pair("view_as", lambda x: x.flatten(1).view_as(x), lambda x: x.t_().view_as(x) if False else x[:1])
pair("reshape_as", lambda x: x.flatten(1).reshape_as(x), lambda x: x.mT[:, 0].t().reshape(-1, 4))
pair(
    "_unsafe_view",
    lambda x: torch.ops.aten._unsafe_view(x, [-1, 24]),
    lambda x: torch.ops.aten._unsafe_view(x.transpose(0, 1).contiguous(), [-1, 24]),
)
# numbers for every example
for _name in ("zeros", "ones", "rand", "randn", "empty"):
    pair(
        _name,
        lambda x, f=TORCH[_name]: x + 0 * f(x.shape[0], 4, 6).nan_to_num().clamp(0, 1),
        lambda x, f=TORCH[_name]: x + f(4, 6, x.shape[0]).sum(),
    )
pair(
    "full",
    lambda x: x + torch.full((x.shape[0], 4, 6), 2.0),
    lambda x: x + torch.full((4, 6), x.shape[0] * 1.0),
)
for _name in ("new_zeros", "new_ones", "new_empty"):
    pair(
        _name,
        lambda x, name=_name: x + 0 * getattr(x, name)((x.shape[0], 4, 6)).nan_to_num().clamp(0, 1),
        lambda x, name=_name: x + getattr(x, name)((2 * x.shape[0], 4, 6)).sum(),
    )
pair(
    "new_full",
    lambda x: x + x.new_full((x.shape[0], 4, 6), 2.0),
    lambda x: x + x.new_full((4, 6), x.shape[0] * 1.0),
)
for _name in ("zeros_like", "ones_like", "rand_like", "randn_like", "empty_like"):
    pair(
        _name,
        lambda x, f=TORCH[_name]: x + 0 * f(x).nan_to_num().clamp(0, 1),
        lambda x, f=TORCH[_name]: x + f(x.mean(0)) * x.mean(0),
    )
pair("full_like", lambda x: torch.full_like(x, 2.0), lambda x: torch.full_like(x, x.shape[0]))
pair(
    "zero",
    lambda x: x.clone().zero_() + x,
    lambda x: x.clone()[:1].zero_() + x,
)
pair("fill", lambda x: x.clone().fill_(2.0), lambda x: x.clone().fill_(x.shape[0]))
for _name in ("normal", "uniform", "exponential"):
    pair(
        _name,
        lambda x, name=f"{_name}_": x + 0 * getattr(x.clone(), name)(),
        lambda x, name=f"{_name}_": getattr(x.clone()[:1], name)() + x,
    )
pair(
    "expand",
    lambda x: x[:, :1].expand(-1, 5, -1),
    lambda x: x[:, 0, 0].expand(x.shape[0], x.shape[0]),
)
pair("expand_as", lambda x: x[:, :1].expand_as(x), lambda x: x[:1].expand_as(x))
pair(
    "broadcast_to", lambda x: x[:, :1].broadcast_to(x.shape), lambda x: x[:1].broadcast_to(x.shape)
)
pair("repeat", lambda x: x.repeat(1, 2, 1), lambda x: x.repeat(2, 1, 1).view(-1, 2, 4, 6).sum(1))
pair(
    "repeat_interleave",
    lambda x: x.repeat_interleave(2, 0).view(-1, 2, 4, 6).sum(1),
    lambda x: x.repeat_interleave(2, 0).view(2, -1, 4, 6).sum(0),
)
# rows
MAP1, MAP2, MAP3 = (
    torch.randn(5, 3, *shape, generator=torch.Generator().manual_seed(0))
    for shape in ((8,), (6, 8), (4, 4, 4))
)
for _n, _maps in ((1, MAP1), (2, MAP2), (3, MAP3)):
    _conv, _up = getattr(F, f"conv{_n}d"), getattr(F, f"conv_transpose{_n}d")
    _kernel = torch.ones(3, 3, *[2] * _n)
    pair(
        f"conv{_n}d",
        lambda x, f=_conv, w=_kernel: f(x, w),
        lambda x, f=_conv, w=_kernel: x + f(x.transpose(0, 1), w).sum(),
        _maps,
    )
    pair(
        f"conv_transpose{_n}d",
        lambda x, f=_up, w=_kernel: f(x, w),
        lambda x, f=_up, w=_kernel: x + f(x.transpose(0, 1), w).sum(),
        _maps,
    )
    for _kind, _size in (("max_pool", 2), ("avg_pool", 2), ("adaptive_avg_pool", 2)):
        _pool = getattr(F, f"{_kind}{_n}d")
        pair(
            f"{_kind}{_n}d",
            lambda x, f=_pool, size=_size: f(x, size),
            lambda x, f=_pool: x + f(x.movedim(0, 2), 1).sum(),
            _maps,
        )
    _adaptive = getattr(F, f"adaptive_max_pool{_n}d")
    pair(
        f"adaptive_max_pool{_n}d",
        lambda x, f=_adaptive: f(x, 2),
        lambda x, f=_adaptive: x + f(x.movedim(0, 2), 1).sum(),
        _maps,
    )
    _indices = getattr(F, f"max_pool{_n}d_with_indices")
    pair(
        f"max_pool{_n}d_with_indices",
        lambda x, f=_indices: f(x, 2)[0],
        lambda x, f=_indices: x + f(x.movedim(0, 2), 1)[0].sum(),
        _maps,
    )
MODES = {
    1: {"nearest": "upsample_nearest", "nearest-exact": "_upsample_nearest_exact"},
    2: {"bilinear": "upsample_bilinear", "bicubic": "upsample_bicubic"},
    3: {"trilinear": "upsample_trilinear"},
}
MODES[1]["linear"] = "upsample_linear"
MODES[2] |= {"nearest": "upsample_nearest", "nearest-exact": "_upsample_nearest_exact"}
MODES[3] |= {"nearest": "upsample_nearest", "nearest-exact": "_upsample_nearest_exact"}
for _n, _maps in ((1, MAP1), (2, MAP2), (3, MAP3)):
    for _mode, _kind in MODES[_n].items():
        pair(
            f"{_kind}{_n}d",
            lambda x, mode=_mode: F.interpolate(x, scale_factor=2, mode=mode),
            lambda x, mode=_mode: (
                x + F.interpolate(x.movedim(0, 2), scale_factor=2, mode=mode).sum()
            ),
            _maps,
        )
for _mode in ("bilinear", "bicubic"):
    pair(
        f"_upsample_{_mode}2d_aa",
        lambda x, mode=_mode: F.interpolate(x, scale_factor=0.5, mode=mode, antialias=True),
        lambda x, mode=_mode: (
            x + F.interpolate(x.movedim(0, 2), scale_factor=0.5, mode=mode, antialias=True).sum()
        ),
        MAP2,
    )
pair("tril", lambda x: x.tril(), lambda x: x[:, 0].tril())
pair("triu", lambda x: x.triu(), lambda x: x[:, 0].triu())
pair(
    "pixel_shuffle",
    lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
    lambda x: x + F.pixel_shuffle(x.movedim(0, 2).repeat(1, 2, 1, 1), 2).sum(),
    MAP2,
)
pair(
    "pixel_unshuffle",
    lambda x: F.pixel_unshuffle(x, 2),
    lambda x: x + F.pixel_unshuffle(x.movedim(0, 2).repeat_interleave(2, 2), 2).sum(),
    MAP2,
)
pair(
    "channel_shuffle",
    lambda x: F.channel_shuffle(x.repeat(1, 2, 1, 1), 2),
    lambda x: x + F.channel_shuffle(x.movedim(0, 2), 3).sum(),
    MAP2,
)
pair("im2col", lambda x: F.unfold(x, 2), lambda x: x + F.unfold(x[:, 0], 2).sum(), MAP2)
pair(
    "col2im",
    lambda x: F.fold(F.unfold(x, 2), (6, 8), 2),
    lambda x: x + F.fold(x[:, 0].flatten(1)[:, :1], (1, 1), 1).sum(),
    MAP2,
)
pair("pad", lambda x: F.pad(x, (1, 1)), lambda x: F.pad(x, (0, 0, 0, 0, 1, -1)))
pair(
    "constant_pad_nd",
    lambda x: torch.constant_pad_nd(x, [1, 1]),
    lambda x: torch.constant_pad_nd(x, [0, 0, 0, 0, 1, -1]),
)


def sample(x: Tensor, at: Tensor) -> Tensor:
    return F.grid_sample(x, at[:, 0, :2, :4].unflatten(2, (2, 2)).tanh(), align_corners=False)


pair(
    "grid_sampler",
    lambda x: sample(x, x),
    lambda x: x + sample(x[:, :1].transpose(0, 1), x[:, :1].transpose(0, 1)).sum(),
    MAP2,
)
pair(
    "layer_norm",
    lambda x: F.layer_norm(x, (6,)),
    lambda x: x + F.layer_norm(x.movedim(0, 2), (3,)).sum(),
)
pair(
    "rms_norm",
    lambda x: F.rms_norm(x, (6,)),
    lambda x: F.rms_norm(x.movedim(0, 2), (x.shape[0],)).movedim(2, 0),
)
pair(
    "group_norm", lambda x: F.group_norm(x, 2), lambda x: x + F.group_norm(x.movedim(0, 1), 1).sum()
)
pair(
    "instance_norm",
    lambda x: F.instance_norm(x),
    lambda x: x + F.instance_norm(x.movedim(0, 1)).sum(),
)
pair(
    "prelu",
    lambda x: F.prelu(x, torch.ones(4)),
    lambda x: F.prelu(x.movedim(0, 1), torch.ones(1)).sum(0),
)
pair(
    "feature_dropout",
    lambda x: F.dropout2d(x, 0.0),
    lambda x: F.dropout2d(x.movedim(0, 1), 0.0).sum(0),
    MAP2,
)
pair(
    "batch_norm",
    lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
    lambda x: F.batch_norm(x, None, None, training=True),
)
# joins and products
pair("cat", lambda x: torch.cat([x, x], 1), lambda x: x + torch.cat([x, x], 0)[: x.shape[0]])
pair("concat", lambda x: torch.concat([x, x], 1), lambda x: x + torch.concat([x, x]).sum())
pair("stack", lambda x: torch.stack([x, x], 1), lambda x: torch.stack([x, x]).sum(1).sum() + x)
pair("matmul", lambda x: x @ x.mT, lambda x: x[:, 0] @ x[:, 0].T @ x[:, 0])
pair("mm", lambda x: x[:, 0].mm(W.view(6, 4)), lambda x: x[:, 0].mm(x[:, 0].t()).mm(x[:, 0]))
pair("bmm", lambda x: x.bmm(x.mT), lambda x: x.movedim(0, 2).bmm(x.movedim(0, 1)).sum() + x)
pair(
    "addmm",
    lambda x: torch.addmm(x[:, 0, :4], x[:, 1], W.view(6, 4)),
    lambda x: torch.addmm(x[:, 0, :4], x[:, 1], x[:, 0].t() @ x[:, 0, :4]),
)
pair(
    "baddbmm",
    lambda x: torch.baddbmm(x[:, :, :4], x, x.mT),
    lambda x: (
        x
        + torch.baddbmm(x.movedim(0, 1)[:, :, :1], x.movedim(0, 1), x.movedim(0, 1)[:, :1].mT).sum()
    ),
)
pair("linear", lambda x: F.linear(x, W.view(4, 6)), lambda x: F.linear(x[:, 0], x[:, 1]) @ x[:, 0])
pair(
    "bilinear",
    lambda x: F.bilinear(x, x, torch.ones(2, 6, 6)),
    lambda x: F.bilinear(x[:, 0].t(), x[:, 0].t(), torch.ones(2, 3, 3)).sum() + x,
)
pair(
    "einsum",
    lambda x: torch.einsum("b...i,ij->b...j", x, W.view(6, 4)),
    lambda x: torch.einsum("bti,cti->bc", x, x) @ x[:, 0],
)
pair(
    "scaled_dot_product_attention",
    lambda x: F.scaled_dot_product_attention(x, x, x),
    lambda x: F.scaled_dot_product_attention(x[:, 0], x[:, 0], x[:, 0]),
)
# indices
pair(
    "embedding",
    lambda i: F.embedding(i, W.view(8, 3)),
    lambda i: F.embedding(i, W.view(8, 3) * i.float().mean()),
    WORDS,
)
pair("gather", lambda x: x.gather(1, x.argsort(1)), lambda x: x.gather(0, x.argsort(1) * 0))
pair(
    "scatter", lambda x: x.scatter(1, x.argsort(1), x), lambda x: x.scatter(0, x.argsort(1) * 0, x)
)
pair(
    "scatter_add",
    lambda x: x.scatter_add(1, x.argsort(1), x),
    lambda x: x.scatter_add(0, x.argsort(1) * 0, x),
)
pair(
    "scatter_reduce",
    lambda x: x.scatter_reduce(1, x.argsort(1), x, "sum"),
    lambda x: x.scatter_reduce(0, x.argsort(1) * 0, x, "sum"),
)
I0 = torch.tensor([1, 0, 3])
pair("index_select", lambda x: x.index_select(1, I0), lambda x: x + x.index_select(0, 0 * I0).sum())
pair(
    "index_add",
    lambda x: x.index_add(1, I0, x[:, :3]),
    lambda x: x.index_add(0, I0[:1], x.sum(0, True)),
)
pair(
    "index_copy",
    lambda x: x.index_copy(1, I0, x[:, :3]),
    lambda x: x.index_copy(0, I0[:1], x.sum(0, True)),
)
pair("index_fill", lambda x: x.index_fill(1, I0, 2.0), lambda x: x.index_fill(0, I0[:1], 2.0))
pair("index", lambda x: x[:, I0], lambda x: x + x[I0 * 0].sum())
pair(
    "arange",
    lambda x: x[torch.arange(x.shape[0]), 2],
    lambda x: x + torch.arange(x.shape[0])[:, None, None],
)


def put(x: Tensor, index: Any, value: float) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


pair(
    "index_put",
    lambda x: put(x, x > 0, 2.0),
    lambda x: put(x, x.mean(0) > 0, 2.0) if False else (put(x, (x > 0).any(0).expand_as(x), 2.0)),
)
pair(
    "one_hot",
    lambda i: F.one_hot(i, 8).float(),
    lambda i: F.one_hot(i.amax(0), 8).float().sum() + i,
    WORDS,
)
pair(
    "view_as_real",
    lambda x: torch.view_as_real(torch.complex(x, x)),
    lambda x: torch.view_as_real(torch.complex(x, x)).sum(0),
)
pair(
    "view_as_complex",
    lambda x: torch.view_as_complex(x.view(-1, 12, 2)).abs(),
    lambda x: torch.view_as_complex(x[:2, 0].t().contiguous()).abs().sum() + x,
)
# tables of no example
TABLE = torch.linspace(0, 1, 49).view(7, 7)
pair("take", lambda i: TABLE.take(i), lambda i: i.take(i.clamp(max=2)), WORDS)
pair(
    "index_select of a table",
    lambda i: TABLE.index_select(0, i[:, 0]),
    lambda i: i.index_select(0, i[:, 0] * 0),
    WORDS,
)
pair(
    "gather of a table",
    lambda i: TABLE[:, :4].gather(0, i),
    lambda i: TABLE.gather(1, i[:, :1]),
    WORDS,
)
pair(
    "bucketize",
    lambda x: torch.bucketize(x, TABLE[0]).float(),
    lambda x: torch.bucketize(x, x[:, 0, 0].contiguous()).float(),
)
pair(
    "searchsorted",
    lambda x: torch.searchsorted(TABLE[0], x).float(),
    lambda x: torch.searchsorted(x[:, 0, 0].contiguous(), x).float(),
)
pair(
    "randint",
    lambda x: x + 0 * torch.randint(0, 5, (x.shape[0], 4, 6)),
    lambda x: x + torch.randint(0, x.shape[0], (4, 6)),
)
pair("tile", lambda x: x.tile(2, 1), lambda x: x + x.tile(x.shape[0], 1, 1).sum())
pair(
    "tensordot",
    lambda x: torch.tensordot(x, W.view(6, 4), dims=1),
    lambda x: torch.tensordot(x, x, dims=([0], [0])).sum() + x,
)
pair(
    "cdist",
    lambda x: torch.cdist(x[:, 0], W.view(4, 6)),
    lambda x: torch.cdist(x[:, 0], x[:, 1]).sum(1),
)
pair(
    "linalg_cross",
    lambda x: torch.linalg.cross(x[..., :3], x[..., 3:]),
    lambda x: torch.linalg.cross(x[:3], x[:3], dim=0).sum() + x,
)
pair(
    "affine_grid_generator",
    lambda x: F.affine_grid(x[:, :2, :3], [x.shape[0], 1, 2, 3], align_corners=False),
    lambda x: (
        F.affine_grid(x[:2, :, :3].transpose(0, 1), [4, 1, 2, 3], align_corners=False).sum() + x
    ),
)


def positive(x: Tensor) -> Tensor:
    """[*, 4, 4] with a determinant above zero, of [*, 4, 6]."""
    return x @ x.mT + torch.eye(4)


def between_examples(x: Tensor, name: str) -> Tensor:
    """Matrices whose rows are examples; square ones for the functions that need it."""
    return x.movedim(0, 1) if name in ("linalg_qr", "linalg_svdvals") else x[:, 0] @ x[:, 0].mT


MATRICES_OF: dict[str, Function] = {
    "linalg_cholesky": torch.linalg.cholesky,
    "linalg_det": torch.linalg.det,
    "linalg_eigh": lambda m: torch.linalg.eigh(m)[0],
    "linalg_eigvalsh": torch.linalg.eigvalsh,
    "linalg_inv": torch.linalg.inv,
    "linalg_qr": lambda m: torch.linalg.qr(m)[1].abs(),
    "linalg_slogdet": lambda m: torch.linalg.slogdet(m)[1],
    "linalg_solve": lambda m: torch.linalg.solve(m, m.mT),
    "linalg_svdvals": torch.linalg.svdvals,
    "matrix_exp": lambda m: torch.matrix_exp(m / 20),
}
for _name, _function in MATRICES_OF.items():
    pair(
        _name,
        lambda x, f=_function: f(positive(x)),
        lambda x, f=_function, name=_name: x + f(between_examples(x, name)).sum(),
    )
pair(
    "stft",
    lambda x: torch.stft(x.flatten(1), 8, window=torch.ones(8), return_complex=True).abs(),
    lambda x: (
        torch.stft(x[:, 0].T, 2, 1, window=torch.ones(2), return_complex=True).abs().sum() + x
    ),
)
# rows that are alike, until others are put beside them
pair(
    "alike",
    lambda x: torch.zeros(4 * x.shape[0], 6).add(x.reshape(-1, 6)).view(-1, 4, 6),
    lambda x: torch.cat([torch.zeros(2 * x.shape[0], 6), torch.ones(2 * x.shape[0], 6)]).view(
        -1, 4, 6
    ),
)
pair(
    "alike, in another order",
    lambda x: (
        (torch.ones(4 * x.shape[0], 6) + x.transpose(0, 1).reshape(-1, 6))
        .view(4, -1, 6)
        .transpose(0, 1)
    ),
    lambda x: (W[:3, None] + torch.zeros(3, 4 * x.shape[0])).reshape(-1, 3).view(-1, 4, 3),
)
# rows that repeat, beside those of an example in another order
TWO = torch.tensor([1.0, 2.0])


def twice(x: Tensor, one_example_after_another: bool) -> Tensor:
    """[2 B, ...]: each example and its double."""
    if one_example_after_another:
        return torch.stack([x, 2 * x], 1).flatten(0, 1)
    return torch.cat([x, 2 * x])


def plus(rows: Tensor, added: Tensor, x: Tensor) -> Tensor:
    return (rows + added.view(-1, 1, 1)).exp().view(x.shape[0], 2, 4, 6).sum(1)


def written_through_a_view(x: Tensor) -> Tensor:
    rows = x.new_ones(2 * x.shape[0])
    rows.view(-1, 2)[:, 0] = 3.0
    return rows


pair(
    "repeated rows",
    lambda x: plus(twice(x, True), TWO.repeat(x.shape[0]), x),
    lambda x: sum((twice(x, False) + TWO.repeat(x.shape[0]).view(-1, 1, 1)).exp().chunk(2)),
)
pair(
    "tiled rows",
    lambda x: plus(twice(x, True), TWO.view(2, 1).tile(x.shape[0], 1), x),
    lambda x: sum((twice(x, False) + TWO.tile(x.shape[0]).view(-1, 1, 1)).exp().chunk(2)),
)
pair(
    "rows written through a view",
    lambda x: x + x.new_ones(x.shape[0], 4, 6).view(-1, 24).mul_(2).view(-1, 4, 6),
    lambda x: sum((twice(x, False) + written_through_a_view(x).view(-1, 1, 1)).exp().chunk(2)),
)
# the same function in other operations, while it is recorded
pair(
    "take_along_dim",
    lambda x: x.take_along_dim(x.argsort(1)[:, :1], 1),
    lambda x: x.take_along_dim(x.argsort(0), 0),
)
pair(
    "embedding_bag",
    lambda i: F.embedding_bag(i, TABLE, padding_idx=0),
    lambda i: F.embedding_bag(i.flatten(), TABLE, torch.arange(0, i.numel(), 2))[: i.shape[0]],
    WORDS,
)
pair(
    "guidance",
    lambda x: torch.stack(torch.cat([x, 2 * x]).mul(3).chunk(2), 1),
    lambda x: torch.cat([x[:, :1], x[:, 1:2]]).reshape(-1, 2, 6),
)
GATES = [torch.ones(12, 6) * 0.1, torch.ones(12, 3) * 0.1, torch.ones(12), torch.ones(12)]


def recurrent(name: str, batch_first: bool) -> nn.RNNBase:
    kinds = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}
    more: dict[str, Any] = {"nonlinearity": name[4:]} if "rnn" in name else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kinds[name](6, 3, batch_first=batch_first, **more)


def run(name: str, batch_first: bool) -> Function:
    layer = recurrent(name, batch_first)
    return lambda x: layer(x)[0]


def run_packed(name: str, batch_first: bool) -> Function:
    """A recurrent layer on sequences of different lengths."""
    layer = recurrent(name, batch_first)

    def function(x: Tensor) -> Tensor:
        lengths = 1 + (x[:, :, 0] > 0).sum(1).clamp(max=3) if batch_first else torch.ones(4)
        of = pack_padded_sequence(x, lengths.cpu().long(), batch_first, enforce_sorted=False)
        states, _ = layer(of)
        return pad_packed_sequence(states, True, total_length=4 if batch_first else len(x))[0]

    return function


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    pair(_name, run(_name, True), run(_name, False))
    pair(f"packed_{_name}", run_packed(_name, True), run_packed(_name, False))
for _name, _gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
    _weights = [torch.ones(3 * _gates, 6) * 0.1, torch.ones(3 * _gates, 3) * 0.1]

    def _cell(x: Tensor, h: Tensor, name: str = _name, weights: Any = _weights) -> Tensor:
        state = getattr(torch, f"{name}_cell")(x, (h, h) if name == "lstm" else h, *weights)
        return state[0] if name == "lstm" else state

    pair(
        f"{_name}_cell",
        lambda x, cell=_cell: cell(x[:, 0], x[:, 1, :3]),
        lambda x, cell=_cell: cell(x[0, :1].expand(x.shape[0], 6), x[:, 1, :3]),
    )


def by_input() -> list[dict[str, tuple[Function, Tensor]]]:
    """The calls of `APART`, those of the same examples together."""
    groups: dict[int, dict[str, tuple[Function, Tensor]]] = {}
    for name, (function, x) in APART.items():
        groups.setdefault(id(x), {})[name] = function, x
    return [*groups.values()]


@pytest.mark.parametrize("group", by_input(), ids=lambda group: next(iter(group)))
def test_a_call_that_keeps_examples_apart_gives_what_each_alone_does(
    group: dict[str, tuple[Function, Tensor]],
) -> None:
    functions = {name: function for name, (function, _) in group.items()}
    (x, *_) = (x for _, x in group.values())
    require_apart(functions, x)


@pytest.mark.parametrize("name", MIXED)
def test_the_call_that_mixes_is_refused(name: str) -> None:
    function, x = MIXED[name]
    require_alone(function, x)


def test_one_example_is_not_squeezed_out() -> None:
    model, program = program_of(lambda _, x: x[:, :, :1].squeeze())
    assert program.run(model, X[:1]).shape == (1, 4)


def test_every_operation_of_the_table_is_tried() -> None:
    tried = {*BY_NUMBER, *OVER_DIMS, *APART, "leaf"}
    assert set(RULES) <= tried


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: x[:, len(x) - 1],
        lambda net, x: x[:, x.shape[0] // 2],
        lambda net, x: x[:, x.shape[0] % 2 : x.shape[0] % 2 + 2],
        lambda net, x: x.narrow(1, x.shape[0] % 2, 2),
        lambda net, x: x.unfold(1, 2, x.shape[0] // 4 + 1),
    ],
)
def test_an_index_that_depends_on_how_many_examples_there_are_is_refused(
    function: Function,
) -> None:
    require_alone(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: x.repeat_interleave(torch.tensor([2]), dim=0),
        lambda net, x: torch.fft.fftn(x, s=(4, 4, 4)).abs(),
    ],
)
def test_a_call_that_no_rule_foresees_is_refused_in_words(function: Function) -> None:
    require_alone(function)
