"""`lowp bench`: modules, kernels and host time, against torch and torchao in the same run."""
