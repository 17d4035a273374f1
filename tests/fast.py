"""How tests make XLA's compiler for CPUs quick; what is left to compile is most of what they take."""

import importlib.metadata

FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""For XLA_FLAGS, also of processes that tests start."""

if importlib.metadata.version("jaxlib").startswith("0.10."):  # newer ones have no choice of emitters
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
