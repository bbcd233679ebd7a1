#include "bindings/bind.h"

NB_MODULE(_C, module) {
  module.doc() = "Kernels of hetero; call them through hetero.kernels.";
  // The default context lives until the process ends.
  nanobind::set_leak_warnings(false);
  hetero::bind_context(module);
  hetero::bind_formats(module);
  hetero::bind_rows(module);
  hetero::bind_linear(module);
  hetero::bind_attention(module);
  hetero::bind_moe(module);
  hetero::bind_sampling(module);
  hetero::bind_probe(module);
}
