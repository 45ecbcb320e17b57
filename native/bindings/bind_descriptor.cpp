#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "bind.hpp"
#include "datastates/base/descriptor.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace datastates::python {
namespace {

/// The descriptor and 0, or none and the error number. A fork by another thread finds the
/// descriptor at once, not only when this thread has the GIL again.
std::pair<FileDescriptor, int> open_without_gil(const char* path, int flags, int mode) {
    const NoGil released;
    FileDescriptor opened(::open(path, flags | O_CLOEXEC, mode));
    const int number = opened.valid() ? 0 : errno;
    return {std::move(opened), number};
}

int close_without_gil(FileDescriptor& one) {
    const NoGil released;
    return one.close();
}

FileDescriptor open_descriptor(const py::object& path, int flags, int mode) {
    PyObject* encoded = nullptr;
    if (PyUnicode_FSConverter(path.ptr(), &encoded) == 0) throw py::error_already_set();
    const auto name = py::reinterpret_steal<py::bytes>(encoded);
    for (;;) {
        auto [opened, number] = open_without_gil(PyBytes_AS_STRING(name.ptr()), flags, mode);
        if (number == 0) return std::move(opened);
        if (number != EINTR) {
            errno = number;
            PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path.ptr());
            throw py::error_already_set();
        }
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

}  // namespace

void bind_descriptor(py::module_& module) {
    py::class_<FileDescriptor>(module, "Descriptor", py::release_gil_before_calling_cpp_dtor())
        .def("fileno", &FileDescriptor::get)
        .def("close", &FileDescriptor::reset, py::call_guard<NoGil>())
        .def("close_written",
             [](FileDescriptor& one) {
                 const int error = close_without_gil(one);
                 if (error == 0) return;
                 errno = error;
                 PyErr_SetFromErrno(PyExc_OSError);
                 throw py::error_already_set();
             })
        .def("__enter__", &FileDescriptor::get)
        .def("__exit__", [](FileDescriptor& one, const py::args& /*error*/) {
            const NoGil released;
            one.reset();
        });
    module.def("open_descriptor", &open_descriptor, "path"_a, "flags"_a, "mode"_a);
}

}  // namespace datastates::python
