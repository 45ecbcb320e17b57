#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "datastates/base/error.hpp"
#include "datastates/base/unmovable.hpp"

namespace datastates::python {

/// The elements of a one-dimensional, C-contiguous array of exactly T in native byte order (bool
/// also passes for u8). Throws Error "invalid" for any other array, so that nothing is converted
/// silently. The span is valid as long as the array. Needs the GIL.
template <typename T>
std::span<const T> elements(const pybind11::array& array, const char* name) {
    const bool same = pybind11::isinstance<pybind11::array_t<T>>(array) ||
                      (sizeof(T) == 1 && array.dtype().kind() == 'b');
    if (!same || array.ndim() != 1 || (array.flags() & pybind11::array::c_style) == 0) {
        throw Error::invalid(std::string(name) + " must be a contiguous 1-d array of " +
                             std::string(pybind11::str(pybind11::dtype::of<T>())) + ", not " +
                             std::string(pybind11::str(array.dtype())));
    }
    return {static_cast<const T*>(array.data()), static_cast<std::size_t>(array.size())};
}

template <typename T>
std::vector<T> copy_elements(const pybind11::array& array, const char* name) {
    const auto view = elements<T>(array, name);
    return {view.begin(), view.end()};
}

/// A contiguous view of a Python buffer's bytes. It holds the buffer until it is destroyed. The
/// constructor and the destructor need the GIL.
class BytesView : Unmovable {
  public:
    explicit BytesView(const pybind11::buffer& buffer);
    ~BytesView() { PyBuffer_Release(&view_); }

    std::span<const std::byte> bytes() const {
        return {static_cast<const std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
    }

  private:
    Py_buffer view_{};
};

/// A new array of the values.
pybind11::array_t<std::uint32_t> to_array(std::span<const std::uint32_t> values);
pybind11::array_t<std::uint64_t> to_array(std::span<const std::uint64_t> values);

}  // namespace datastates::python
