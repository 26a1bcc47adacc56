"""Programs of workers without TensorFlow that answer as its gRPC server does."""

PROGRAM = """
import socket, threading
def serve(address):
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as server:
        while True:
            client, _ = server.accept()
            client.recv(100)
            client.sendall(bytes(3) + b"\\4" + bytes(5))  # an empty SETTINGS frame of HTTP/2
            client.close()
def answer(address): threading.Thread(target=serve, args=(address,), daemon=True).start()
"""
