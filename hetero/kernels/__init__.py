"""CPU kernels: the only importer of the extension hetero._C."""
