"""The known operations, in groups that share a rule (`rules`).

To add an operation, add its name to the group of its kind. In `tests/gradients/program`, add a call
that keeps examples apart and one that mixes them.
"""

from __future__ import annotations

from zdp_bench.gradients.program.rules import (
    Rule,
    all_in_rows,
    along,
    batch_norm,
    by_sizes,
    constant,
    cut,
    einsum,
    filled,
    from_table,
    gathered,
    in_last,
    in_rows,
    indexed,
    instance_norm,
    joined,
    matrices,
    normalised,
    numbers,
    padded,
    put,
    recurrent,
    repeated,
    repeated_in_place,
    reshaped,
    selected,
    squeezed,
)


def _words(names: str) -> list[str]:
    return names.split()


BY_NUMBER = _words("""
    __and__ __or__ __xor__ _conj _to_copy abs acos acosh add addcdiv addcmul alias alpha_dropout
    angle asin asinh atan atan2 atanh bernoulli bitwise_and bitwise_not bitwise_or bitwise_xor ceil
    celu clamp clamp_max clamp_min clip clone complex conj_physical contiguous copy copysign cos
    cosh deg2rad detach digamma div dropout elu eq erf erfc erfinv exp exp2 expm1 float_power floor
    floor_divide fmax fmin fmod frac ge gelu greater gt hardshrink hardsigmoid hardswish hardtanh
    heaviside hypot imag isfinite isinf isnan le leaky_relu lerp less lgamma lift_fresh_copy log
    log10 log1p log2 log_sigmoid logaddexp logical_and logical_not logical_or logical_xor logit lt
    masked_fill maximum minimum mish mul multiply nan_to_num ne neg polar positive pow rad2deg real
    reciprocal relu relu6 remainder resolve_conj resolve_neg round rrelu rsqrt rsub selu sgn sigmoid
    sign silu sin sinc sinh softplus softshrink special_expit special_xlog1py sqrt square sub
    subtract tan tanh threshold to true_divide trunc type_as where xlogy
""")
OVER_DIMS = _words("""
    all amax amin any argmax argmin cosine_similarity count_nonzero kthvalue linalg_vector_norm
    logsumexp max mean median min mode nanmean nansum norm prod std std_mean sum var var_mean
""")
ALONG_DIMS = _words("""
    argsort cummax cummin cumprod cumsum diff fft_fft fft_fft2 fft_fftn fft_fftshift fft_ifft
    fft_ifft2 fft_ifftn fft_ifftshift fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
    flip glu linalg_cross log_softmax logcumsumexp roll softmax sort topk
""")
VIEWS = _words("""
    adjoint diagonal mH mT matrix_H moveaxis movedim narrow numpy_T permute select slice squeeze
    swapaxes swapdims t transpose unbind unfold unsqueeze
""")
CUTS = _words("chunk split split_with_sizes")
RESHAPES = _words("_unsafe_view flatten reshape reshape_as unflatten view view_as")
EXPANDS = _words("expand expand_as broadcast_to")
REPEATS = _words("repeat tile")
MATRICES = _words("""
    linalg_cholesky linalg_det linalg_eigh linalg_eigvalsh linalg_inv linalg_qr linalg_slogdet
    linalg_solve linalg_svdvals matrix_exp
""")
PRODUCTS = _words("addmm baddbmm bilinear bmm cdist linear matmul mm tensordot")
CONSTANTS = _words("empty full new_empty new_full new_ones new_zeros ones rand randint randn zeros")
FILLS = _words("""
    empty_like exponential fill full_like normal ones_like rand_like randn_like uniform zero
    zeros_like
""")
ROWS = _words("channel_shuffle feature_dropout group_norm leaf prelu")
MAPS_1D = _words("""
    _upsample_nearest_exact1d adaptive_avg_pool1d adaptive_max_pool1d avg_pool1d col2im conv1d
    conv_transpose1d max_pool1d max_pool1d_with_indices upsample_linear1d upsample_nearest1d
""")
MAPS_2D = _words("""
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact2d adaptive_avg_pool2d
    adaptive_max_pool2d avg_pool2d conv2d conv_transpose2d im2col max_pool2d max_pool2d_with_indices
    upsample_bicubic2d upsample_bilinear2d upsample_nearest2d
""")
MAPS_3D = _words("""
    _upsample_nearest_exact3d adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d conv3d
    conv_transpose3d max_pool3d max_pool3d_with_indices upsample_nearest3d upsample_trilinear3d
""")
RECURRENT = _words("gru lstm rnn_relu rnn_tanh")
PACKED = [f"packed_{kind}" for kind in RECURRENT]
CELLS = _words("gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell")
GATHERED = _words("gather scatter scatter_add scatter_reduce")
SELECTED = _words("index_add index_copy index_fill index_select")

GROUPS: list[tuple[Rule, list[str]]] = [
    (by_sizes, [*BY_NUMBER, *OVER_DIMS, *PRODUCTS, *VIEWS, "view_as_real", "one_hot"]),
    (along, ALONG_DIMS),
    (in_last(1), ["view_as_complex"]),
    (in_last(2), ["tril", "triu"]),
    (in_last(3), ["pixel_shuffle", "pixel_unshuffle"]),
    (normalised, ["layer_norm", "rms_norm"]),
    (padded, ["pad", "constant_pad_nd"]),
    (in_rows(), ROWS),
    (in_rows(2), ["stft"]),
    (in_rows(3), MAPS_1D),
    (in_rows(4), MAPS_2D),
    (in_rows(5), MAPS_3D),
    (batch_norm, ["batch_norm"]),
    (instance_norm, ["instance_norm"]),
    (all_in_rows, [*CELLS, "grid_sampler", "affine_grid_generator"]),
    (matrices, [*MATRICES, "scaled_dot_product_attention"]),
    (recurrent, [*RECURRENT, *PACKED]),
    (einsum, ["einsum"]),
    (squeezed, ["squeeze"]),  # overrides `by_sizes`, as `squeeze` is also in VIEWS
    (cut, CUTS),
    (reshaped, RESHAPES),
    (repeated, REPEATS),
    (repeated_in_place, ["repeat_interleave"]),
    (joined, ["cat", "concat", "stack"]),
    (constant, CONSTANTS),
    (filled, [*FILLS, *EXPANDS]),
    (numbers, ["arange"]),
    (from_table("weight"), ["embedding"]),
    (from_table("self"), ["take"]),
    (from_table("boundaries", "sorted_sequence", "sorter"), ["bucketize", "searchsorted"]),
    (gathered, GATHERED),
    (selected, SELECTED),
    (indexed, ["index"]),
    (put, ["index_put"]),
]
RULES: dict[str, Rule] = {name: rule for rule, names in GROUPS for name in names}

SIZES = ("size", "shape", "sizes")
# Arguments that may be computed from the batch size.
SIZED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys([*RESHAPES, *EXPANDS, *CONSTANTS, "affine_grid_generator"], SIZES),
    **dict.fromkeys(REPEATS, ("repeats", "dims")),
    **dict.fromkeys(CUTS, ("split_size", "split_sizes")),
    "arange": ("end",),
}
# Operations that may overwrite their first argument.
IN_PLACE = {*BY_NUMBER, *FILLS, *ALONG_DIMS, *GATHERED, *SELECTED, "index_put"}
# Operations that may be applied to `arange(B)` before it is used as an index.
OF_INDEX = {"view", "reshape", "unsqueeze", "expand", "to", "_to_copy", "alias", "clone"}
# Operations that read only the type or shape of an argument, not its values.
READS_NO_NUMBER: dict[str, str] = {
    **dict.fromkeys(["expand_as", "reshape_as", "view_as", "type_as", "to"], "other"),
    **dict.fromkeys([*CONSTANTS, *FILLS], "self"),
}
