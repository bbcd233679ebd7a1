// The table of quantised formats; hetero/formats.py is its Python side. bf16 is the plain one.
#pragma once

#include <span>
#include <string>

#include "formats/format.h"

namespace hetero {

std::span<const Format> formats();

// The format called `name` with `group` values of K per scale (0: its own number). Throws
// std::invalid_argument for an unknown name or a group that the format does not have.
Format format_named(const std::string& name, int group);

}  // namespace hetero
