"""The CPU's own kernels: a whole step of a model in one call of C++."""
