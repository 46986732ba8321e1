// Messages from parts: text("needs ", 3, " pages").
#pragma once

#include <sstream>
#include <string>

namespace north_jax::megakernel {

template <typename... Parts>
std::string text(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

}  // namespace north_jax::megakernel
