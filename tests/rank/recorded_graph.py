"""What a CUDA graph does, on a CPU: operations are recorded, and made again at every replay."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph(TorchDispatchMode):
    """Records what is computed in it; ``replay`` writes new results where the old ones are."""

    def __init__(self):
        super().__init__()
        self.operations = []
        self.capturing = False

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.operations.append((operation, args, kwargs or {}, result))
        return result

    def __enter__(self):
        self.capturing = True
        return super().__enter__()

    def __exit__(self, *error):
        self.capturing = False
        return super().__exit__(*error)

    @torch.no_grad()
    def replay(self):
        for operation, args, kwargs, result in self.operations:
            again = operation(*args, **kwargs)
            for before, now in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(before, torch.Tensor) and before.data_ptr() != now.data_ptr():
                    before.copy_(now)


class Wrapped:
    """torchtitan's wrapper: one call as it is, then a capture, then replays of it."""

    def __init__(self, function, parameters):
        self.function = function
        self.parameters = list(parameters)
        self.graph = None
        self.given = None
        self.calls = 0

    def __call__(self, *tensors):
        self.calls += 1
        if self.calls == 1:
            return self.function(*tensors)
        if self.graph is None:
            self.graph = RecordedGraph()
            self.given = [tensor.clone() for tensor in tensors]
            before = [parameter.grad.clone() for parameter in self.parameters]
            with self.graph:
                self.loss = self.function(*self.given)
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad.copy_(gradient)  # a GPU computes nothing while it captures
        for static, tensor in zip(self.given, tensors, strict=True):
            static.copy_(tensor)
        self.graph.replay()
        return self.loss

    @property
    def capturing(self):
        return self.graph is not None and self.graph.capturing
