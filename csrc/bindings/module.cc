#include "bindings/bind.h"

NB_MODULE(_C, module) {
  module.doc() = "Kernels of hetero; call them through hetero.kernels.";
  hetero::bind_context(module);
  hetero::bind_rows(module);
  hetero::bind_linear(module);
}
