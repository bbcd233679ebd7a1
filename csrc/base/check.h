// HETERO_CHECK(condition, parts...): throws std::invalid_argument with the parts joined into a
// message.
#pragma once

#include <sstream>
#include <stdexcept>

namespace hetero {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

}  // namespace hetero

#define HETERO_CHECK(condition, ...)               \
  do {                                             \
    if (!(condition)) ::hetero::fail(__VA_ARGS__); \
  } while (0)
