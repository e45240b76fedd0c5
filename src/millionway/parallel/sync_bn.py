"""Batch normalization over the images of all ranks.

With it a run does not depend on the number of ranks, but for rounding. torch's own refuses the CPU, so there is one for
it here.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from millionway.parallel import collectives
from millionway.parallel.group import Group


def synchronize(network: nn.Module, group: Group, device: torch.device) -> nn.Module:
    """The network with its BN layers replaced. Parameters and statistics keep their names."""
    if group.size == 1:
        return network
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(network)
    return _replaced(network, group)


def _replaced(module: nn.Module, group: Group) -> nn.Module:
    if isinstance(module, _BatchNorm):
        return SyncBatchNorm(module, group)
    for name, child in module.named_children():
        setattr(module, name, _replaced(child, group))
    return module


def average_statistics(network: nn.Module, group: Group) -> None:
    """Every rank goes on with the mean of all ranks' running statistics.

    Training does not read them, and they are averages of averages: there it does not matter when this is done. Nor how
    often: in float64 the mean of equal numbers is that number. A run that goes on evaluates once more than others.
    """
    if group.size == 1:
        return
    names = ("running_mean", "running_var")
    layers = [layer for layer in network.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    statistics = [getattr(layer, name) for layer in layers for name in names]
    if statistics:
        means = collectives.all_reduce(group, torch.cat([each.flatten() for each in statistics]).double()) / group.size
        for each, mean in zip(statistics, means.split([each.numel() for each in statistics])):
            each.copy_(mean.view_as(each))


class SyncBatchNorm(_BatchNorm):
    """Takes over the parameters and statistics of an ordinary layer."""

    def __init__(self, layer: _BatchNorm, group: Group) -> None:
        like = next(iter(layer.state_dict().values()), torch.empty(0))
        super().__init__(
            layer.num_features,
            layer.eps,
            layer.momentum,
            layer.affine,
            layer.track_running_stats,
            device=like.device,
            dtype=like.dtype,
        )
        self.load_state_dict(layer.state_dict())
        self.train(layer.training)
        self.group = group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, not {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        output, mean, variance, num = _Normalize.apply(input, self.weight, self.bias, self.eps, self.group)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            with torch.no_grad():
                self.num_batches_tracked += 1
                rate = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean, rate)
                self.running_var.lerp_(variance * (num / (num - 1)), rate)
        return output


class _Normalize(torch.autograd.Function):
    """One exchange in each direction."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group):
        dims, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
        ctx.dtype = x.dtype
        x = x.float() if x.dtype == torch.bfloat16 else x  # as BN of one process computes
        variance, mean = torch.var_mean(x.detach(), dims, correction=0)
        num = x.new_full((1, x.shape[1]), x.numel() / x.shape[1])
        parts = collectives.all_gather(
            group, torch.stack([mean, variance, num[0]])[None].double()
        )  # [ranks, 3, channels]
        num = parts[:, 2].sum(dim=0)
        weight_of_rank = parts[:, 2] / num
        mean = (weight_of_rank * parts[:, 0]).sum(dim=0)
        variance = (weight_of_rank * (parts[:, 1] + (parts[:, 0] - mean) ** 2)).sum(dim=0)
        inverse = (variance + eps).rsqrt().to(x.dtype).view(shape)
        mean, variance = mean.to(x.dtype), variance.to(x.dtype)
        normal = (x - mean.view(shape)) * inverse
        ctx.save_for_backward(normal, inverse, weight)
        ctx.group, ctx.dims, ctx.shape, ctx.num = group, dims, shape, float(num[0])
        output = normal if weight is None else normal * weight.view(shape)
        output = output if bias is None else output + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance)
        return output.to(ctx.dtype), mean, variance, float(num[0])

    @staticmethod
    def backward(ctx, *upstream: Tensor):
        normal, inverse, weight = ctx.saved_tensors
        gradient = upstream[0].to(normal.dtype)
        sums = torch.stack([gradient.sum(ctx.dims), (gradient * normal).sum(ctx.dims)])
        bias_gradient, weight_gradient = sums.clone()  # this rank's; data-parallel averaging takes care of the rest
        mean, along = (collectives.all_reduce(ctx.group, sums.double()) / ctx.num).to(gradient.dtype)
        x_gradient = (gradient - mean.view(ctx.shape) - normal * along.view(ctx.shape)) * inverse
        if weight is None:
            return x_gradient.to(ctx.dtype), None, None, None, None
        x_gradient = (x_gradient * weight.view(ctx.shape)).to(ctx.dtype)
        return x_gradient, weight_gradient, bias_gradient, None, None
