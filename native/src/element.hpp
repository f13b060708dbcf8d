// Element types of a cache, as kvlink.layout.DType names them (a test compares the names).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvlink {

enum class Element : int { float16, bfloat16, float32, float8_e4m3, float8_e5m2, int8 };

struct ElementFacts {
  std::string_view name;
  std::int64_t bytes;
  std::string_view kernel_type;  // in kernels/numbers.hpp
};

inline constexpr std::array<ElementFacts, 6> kElements = {{
    {"float16", 2, "Float16"},
    {"bfloat16", 2, "BFloat16"},
    {"float32", 4, "Float32"},
    {"float8_e4m3", 1, "Float8E4M3"},
    {"float8_e5m2", 1, "Float8E5M2"},
    {"int8", 1, "Int8"},
}};

constexpr const ElementFacts& facts_of(Element element) { return kElements[static_cast<std::size_t>(element)]; }

}  // namespace kvlink
