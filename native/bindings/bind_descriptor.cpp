#include <fcntl.h>

#include <cerrno>

#include "bind.hpp"
#include "datastates/base/descriptor.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace datastates::python {
namespace {

/// The descriptor, or the negative error number.
int open_without_gil(const char* path, int flags, int mode) {
    const py::gil_scoped_release release;
    const int fd = ::open(path, flags | O_CLOEXEC, mode);
    return fd < 0 ? -errno : fd;
}

FileDescriptor open_descriptor(const py::object& path, int flags, int mode) {
    PyObject* encoded = nullptr;
    if (PyUnicode_FSConverter(path.ptr(), &encoded) == 0) throw py::error_already_set();
    const auto name = py::reinterpret_steal<py::bytes>(encoded);
    for (;;) {
        const int fd = open_without_gil(PyBytes_AS_STRING(name.ptr()), flags, mode);
        if (fd >= 0) return FileDescriptor(fd);
        if (fd != -EINTR) {
            errno = -fd;
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
        .def("close", &FileDescriptor::reset, py::call_guard<py::gil_scoped_release>())
        .def("__enter__", &FileDescriptor::get)
        .def("__exit__", [](FileDescriptor& one, const py::args& /*error*/) {
            const py::gil_scoped_release release;
            one.reset();
        });
    module.def("open_descriptor", &open_descriptor, "path"_a, "flags"_a, "mode"_a);
}

}  // namespace datastates::python
