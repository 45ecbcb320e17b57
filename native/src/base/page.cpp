#include "datastates/base/page.hpp"

#include <unistd.h>

namespace datastates {

std::size_t page_size() {
    static const auto size = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    return size;
}

}  // namespace datastates
