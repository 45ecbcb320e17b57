#include "layouts.hpp"

#include <cstdint>
#include <vector>

#include "dlpack.hpp"

namespace py = pybind11;

namespace datastates::python {
namespace {

/// The API of an array's type; null where it has none that we know.
const dlpack::ExchangeApi* api_of(PyTypeObject* type) {
    const auto capsule = py::reinterpret_steal<py::object>(
        PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), dlpack::kAttribute));
    if (!capsule || PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsule) == 0) {
        PyErr_Clear();
        return nullptr;
    }
    const auto* api = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule));
    const bool known =
        api->version.major == dlpack::kMajor && api->tensor_from_py_object_no_sync != nullptr;
    return known ? api : nullptr;
}

}  // namespace

py::object layouts(const py::list& arrays) {
    std::vector<std::int64_t> words;
    words.reserve(arrays.size() * 8);
    const PyTypeObject* last = nullptr;
    const dlpack::ExchangeApi* api = nullptr;
    for (const py::handle array : arrays) {
        PyTypeObject* const type = Py_TYPE(array.ptr());
        if (type != last) {
            api = api_of(type);
            last = type;
        }
        dlpack::Tensor tensor{};
        if (api == nullptr) return py::none();
        if (api->tensor_from_py_object_no_sync(array.ptr(), &tensor) != 0) {
            PyErr_Clear();  // of a kind that cannot be exchanged: no error of the caller's
            return py::none();
        }
        words.push_back(static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(type)));
        words.push_back(static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(tensor.data)) +
                        static_cast<std::int64_t>(tensor.byte_offset));
        words.push_back((std::int64_t{tensor.device.type} << 32) | tensor.device.id);
        words.push_back((std::int64_t{tensor.dtype.lanes} << 48) |
                        (std::int64_t{tensor.dtype.code} << 40) |
                        (std::int64_t{tensor.dtype.bits} << 32) | tensor.ndim);
        words.insert(words.end(), tensor.shape, tensor.shape + tensor.ndim);
        if (tensor.strides == nullptr) continue;  // contiguous
        words.insert(words.end(), tensor.strides, tensor.strides + tensor.ndim);
    }
    return py::bytes(reinterpret_cast<const char*>(words.data()),
                     words.size() * sizeof(std::int64_t));
}

}  // namespace datastates::python
