#include "datastates/plan_checks.hpp"

#include <limits>
#include <string>

#include "datastates/base/error.hpp"
#include "datastates/plan.hpp"

namespace datastates {

void require(bool condition, const char* what, std::size_t index) {
    if (condition) return;
    throw Error::invalid(std::string(what) + " (at " + std::to_string(index) + ")");
}

void require_size(std::size_t actual, std::size_t expected, const char* name) {
    if (actual == expected) return;
    throw Error::invalid(std::string(name) + " has " + std::to_string(actual) +
                         " entries, expected " + std::to_string(expected));
}

void require_index(std::span<const std::uint64_t> index, std::size_t rows, std::size_t total,
                   const char* name) {
    require_size(index.size(), rows + 1, name);
    require(index.front() == 0, name, 0);
    for (std::size_t i = 0; i < rows; ++i) require(index[i] <= index[i + 1], name, i);
    require(index.back() == total, name, rows);
}

bool within(std::uint64_t offset, std::uint64_t length, std::uint64_t total) {
    return offset <= total && length <= total - offset;
}

bool spaced_within(std::uint64_t offset, std::uint64_t length, std::uint64_t count,
                   std::uint64_t step, std::uint64_t total) {
    if (count == 0 || !within(offset, length, total)) return false;
    return count == 1 ||
           (step > 0 && step >= length && count - 1 <= (total - offset - length) / step);
}

void Buffers::validate(std::span<const std::uint64_t> nbytes, bool with_witness) const {
    const std::size_t n = nbytes.size();
    require_size(address.size(), n, "ptr");
    require_size(device.size(), n, "device");
    require_size(stream.size(), n, "stream");
    if (with_witness) require_size(witness.size(), n, "witness");
    for (std::size_t i = 0; i < n; ++i) {
        require(device[i] >= -1, "device is out of range", i);
        if (nbytes[i] == 0) continue;
        require(address[i] != 0, "a pointer is null", i);
        require(address[i] <= std::numeric_limits<std::uint64_t>::max() - nbytes[i],
                "a pointer is out of range", i);
    }
}

}  // namespace datastates
