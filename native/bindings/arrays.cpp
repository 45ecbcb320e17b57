#include "arrays.hpp"

namespace datastates::python {

BytesView::BytesView(const pybind11::buffer& buffer) {
    if (PyObject_GetBuffer(buffer.ptr(), &view_, PyBUF_SIMPLE) != 0) {
        throw pybind11::error_already_set();
    }
}

pybind11::array_t<std::uint32_t> to_array(std::span<const std::uint32_t> values) {
    return pybind11::array_t<std::uint32_t>(static_cast<pybind11::ssize_t>(values.size()),
                                            values.data());
}

pybind11::array_t<std::uint64_t> to_array(std::span<const std::uint64_t> values) {
    return pybind11::array_t<std::uint64_t>(static_cast<pybind11::ssize_t>(values.size()),
                                            values.data());
}

}  // namespace datastates::python
