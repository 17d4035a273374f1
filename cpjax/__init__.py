"""cpjax: context-parallel training of vision-language models in JAX.

Three floors, imports only point down: `cpjax` (index maps, attention, recurrences, loss), `cpjax.models`
(Flax model families) and `cpjax.train` (the trainer). Nothing is imported here, so that `import cpjax.shard`
stays as light as jax and numpy.
"""

__version__ = "0.1.0"
