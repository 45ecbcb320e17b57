#include "arrays.hpp"

namespace datastates::python {

BytesView::BytesView(const pybind11::buffer& buffer) {
    if (PyObject_GetBuffer(buffer.ptr(), &view_, PyBUF_SIMPLE) != 0) {
        throw pybind11::error_already_set();
    }
}

pybind11::bytes to_bytes(std::span<const std::uint32_t> values) {
    return {reinterpret_cast<const char*>(values.data()), values.size_bytes()};
}

}  // namespace datastates::python
