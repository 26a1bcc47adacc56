"""Programs of workers without TensorFlow that answer as its gRPC server does."""

PROGRAM = """
import socket, threading, time
def serve(address, until):
    clients = []
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as server:
        while True:
            client, _ = server.accept()
            if time.monotonic() < until:
                client.recv(100)
                client.sendall(bytes(3) + b"\\4" + bytes(5))  # an empty SETTINGS frame of HTTP/2
                client.close()
            else:
                clients.append(client)  # which waits
def answer(address, seconds=1e9):
    until = time.monotonic() + seconds
    threading.Thread(target=serve, args=(address, until), daemon=True).start()
"""
