// HETERO_CHECK(condition, parts...): throws std::invalid_argument with the parts joined into a
// message.
//
// No streams: with a static libstdc++ beside the interpreter's own, numbers may find no locale
// facet and vanish.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace hetero {

template <class Part>
void append_part(std::string& message, const Part& part) {
  if constexpr (std::is_arithmetic_v<Part>) {
    message += std::to_string(part);
  } else {
    message += part;
  }
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::string message;
  (append_part(message, parts), ...);
  throw std::invalid_argument(message);
}

}  // namespace hetero

#define HETERO_CHECK(condition, ...)               \
  do {                                             \
    if (!(condition)) ::hetero::fail(__VA_ARGS__); \
  } while (0)
